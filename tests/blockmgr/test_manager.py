"""Tables and slots: against a plain model under random operations, and all or nothing."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.blockmgr import BlockId, BlockManager, Sequence
from kvq.errors import ConfigError, OutOfBlocks

STEP = st.one_of(
    st.tuples(st.just("append"), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 11)), max_size=4)),
    st.tuples(st.just("free"), st.integers(0, 4)),
    st.tuples(st.just("new"), st.just(0)),
)


def state(manager: BlockManager, sequences: list[Sequence]) -> Any:
    """Everything that an operation could change."""
    return (
        [(list(pool._free), list(pool._refs)) for pool in manager.pools],
        [(s.length, [list(t) for t in s.tables]) for s in sequences],
    )


@settings(derandomize=True, deadline=None, database=None, max_examples=120)
@given(
    num_blocks=st.lists(st.integers(2, 14), min_size=1, max_size=3),
    block_size=st.integers(1, 5),
    steps=st.lists(STEP, min_size=1, max_size=40),
)
def test_random_operations_agree_with_a_dictionary_of_slots(
    num_blocks: list[int], block_size: int, steps: list[tuple[str, Any]]
) -> None:
    manager = BlockManager(num_blocks=num_blocks, block_size=block_size)
    live: dict[Sequence, list[list[int]]] = {}  # slots of every token, per layer group
    for operation, argument in steps:
        order = list(live)
        if operation == "new" or not order:
            if len(order) < 5:
                live[manager.new_sequence()] = [[] for _ in num_blocks]
        elif operation == "free":
            sequence = order[argument % len(order)]
            manager.free(sequence)
            del live[sequence]
        else:
            work = list({order[i % len(order)]: count for i, count in argument}.items())
            try_append(manager, live, work, num_blocks)
        manager.check_integrity()
        for group, total in enumerate(num_blocks):
            slots = [slot for per_group in live.values() for slot in per_group[group]]
            assert len(set(slots)) == len(slots)  # no slot in two sequences, or twice in one
            assert all(0 <= slot < total * block_size for slot in slots)
            used = sum(-(-s.length // block_size) for s in live)
            assert manager.pools[group].num_free == total - used
        for sequence, slots_by_group in live.items():
            assert [len(slots) for slots in slots_by_group] == [sequence.length] * len(num_blocks)
            for table, slots in zip(sequence.tables, slots_by_group, strict=True):
                assert [
                    table[i // block_size] * block_size + i % block_size for i in range(len(slots))
                ] == slots


def try_append(
    manager: BlockManager,
    live: dict[Sequence, list[list[int]]],
    work: list[tuple[Sequence, int]],
    num_blocks: list[int],
) -> None:
    """Append, or see it refused exactly when the plain count of blocks says so."""
    size = manager.block_size
    need = {s: -(-(s.length + n) // size) - -(-s.length // size) for s, n in work}
    used = sum(-(-s.length // size) for s in live)
    fits = all(used + sum(need.values()) <= total for total in num_blocks)
    before = state(manager, list(live))
    assert manager.can_append(work) == fits
    assert {s: manager.blocks_needed(s, n) for s, n in work} == need
    assert state(manager, list(live)) == before  # neither question changed anything
    if not fits:
        with pytest.raises(OutOfBlocks):
            manager.append(work)
        assert state(manager, list(live)) == before
        return
    slots = manager.append(work)
    for group, group_slots in enumerate(slots):
        assert len(group_slots) == sum(n for _, n in work)
        at = 0
        for sequence, count in work:
            live[sequence][group] += group_slots[at : at + count]
            at += count


def test_append_is_all_or_nothing_over_sequences_and_groups() -> None:
    manager = BlockManager(num_blocks=[9, 4], block_size=4)
    a, b = manager.new_sequence(), manager.new_sequence()
    manager.append([(a, 5)])
    before = state(manager, [a, b])
    # the first group has room for all, the second not for both together
    assert manager.can_append([(a, 4)])
    assert manager.can_append([(b, 8)])
    assert not manager.can_append([(a, 4), (b, 8)])
    with pytest.raises(
        OutOfBlocks, match=r"12 more tokens need 3 blocks of 4, but only 2 of 4 are free; shorten"
    ):
        manager.append([(a, 4), (b, 8)])
    assert state(manager, [a, b]) == before
    manager.check_integrity()


def test_tokens_fill_the_last_block_before_a_new_one_is_taken() -> None:
    manager = BlockManager(num_blocks=[3], block_size=4)
    sequence = manager.new_sequence()
    assert manager.append([(sequence, 3)]) == [[0, 1, 2]]
    assert manager.append([(sequence, 1)]) == [[3]]
    assert manager.append([(sequence, 2)]) == [[4, 5]]
    assert sequence.tables == [[0, 1]]


def test_no_tokens_take_no_blocks() -> None:
    manager = BlockManager(num_blocks=[2], block_size=4)
    sequence = manager.new_sequence()
    assert manager.append([(sequence, 0)]) == [[]]
    assert manager.append([]) == [[]]
    assert (sequence.length, sequence.tables) == (0, [[]])


def test_a_freed_sequence_gives_back_its_blocks_and_is_dead() -> None:
    manager = BlockManager(num_blocks=[3, 3], block_size=4)
    sequence = manager.new_sequence()
    manager.append([(sequence, 12)])
    manager.free(sequence)
    assert [pool.num_free for pool in manager.pools] == [3, 3]
    with pytest.raises(AssertionError, match="freed"):
        manager.append([(sequence, 1)])
    with pytest.raises(AssertionError, match="freed already"):
        manager.free(sequence)
    manager.check_integrity()


def test_a_sequence_comes_at_most_once_in_one_append() -> None:
    manager = BlockManager(num_blocks=[3], block_size=4)
    sequence = manager.new_sequence()
    with pytest.raises(AssertionError, match="comes twice"):
        manager.append([(sequence, 1), (sequence, 1)])
    assert sequence.length == 0


def test_a_shared_block_outlives_the_sequence_that_wrote_it() -> None:
    manager = BlockManager(num_blocks=[3], block_size=4)
    sequence = manager.new_sequence()
    manager.append([(sequence, 8)])
    block = sequence.tables[0][0]
    manager.pools[0].share(block)
    manager.free(sequence)
    assert manager.pools[0].references(block) == 1
    assert manager.pools[0].num_free == 2


@pytest.mark.parametrize("block_size", [0, -4])
def test_a_block_holds_at_least_one_token(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"block_size must be at least 1 token, got {block_size}"):
        BlockManager(num_blocks=[2], block_size=block_size)


CORRUPTIONS: dict[str, tuple[Callable[[BlockManager, Sequence], object], str]] = {
    "a lost block": (lambda _, s: s.tables[1].pop(), "a table has the wrong length"),
    "a block too many": (lambda _, s: s.tables[0].append(BlockId(3)), "a table has the wrong length"),
    "a grown length": (lambda _, s: setattr(s, "length", 9), "a table has the wrong length"),
    "another's block": (lambda _, s: s.tables[0].__setitem__(0, BlockId(2)), "references and tables differ"),
    "a freed block": (
        lambda m, s: m.pools[1].release(s.tables[1][0]),
        "block 0: references and tables differ",
    ),
    "a stray reference": (
        lambda m, s: m.pools[0].share(s.tables[0][1]),
        "block 1: references and tables differ",
    ),
    "a forgotten sequence": (lambda m, s: m._live.discard(s), "block 0: references and tables differ"),
    "a broken pool": (lambda m, _: m.pools[1]._free.popleft(), "unreferenced and free blocks differ"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_check_integrity_finds(name: str) -> None:
    manager = BlockManager(num_blocks=[5, 5], block_size=4)
    first, second = manager.new_sequence(), manager.new_sequence()
    manager.append([(first, 8), (second, 3)])
    manager.check_integrity()
    corrupt, reason = CORRUPTIONS[name]
    corrupt(manager, first)
    with pytest.raises(AssertionError, match=reason):
        manager.check_integrity()
