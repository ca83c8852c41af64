"""Tables: room for tokens, copy-on-write, windows, rewinding, scrubbing."""

import random

import pytest

from kvq.blockmgr import BlockManager, Copy, Scrub, Sequence
from kvq.errors import ConfigError, OutOfBlocks
from tests.blockmgr.helpers import cache, compute, hit, manager, run
from tests.blockmgr.state import state


def test_tokens_fill_the_last_block_before_a_new_one_is_taken() -> None:
    blocks = manager(3, size=4)
    sequence = blocks.new_sequence()
    assert blocks.append([(sequence, 3)]) == [[0, 1, 2]]
    assert blocks.append([(sequence, 1)]) == [[3]]
    assert blocks.append([(sequence, 2)]) == [[4, 5]]
    assert sequence.tables == [[0, 1]]


def test_slots_are_those_of_the_table_for_any_work() -> None:
    rng = random.Random(3)
    for _ in range(200):
        size = rng.randint(1, 5)
        blocks = manager(90, 90, size=size, windows=[None, 4])
        sequences = [blocks.new_sequence() for _ in range(3)]
        for _ in range(4):
            work = [(s, rng.randint(0, 7)) for s in sequences if rng.random() < 0.8]
            before = [s.length for s, _ in work]
            for group, slots in enumerate(blocks.append(work)):
                assert slots == [
                    s.tables[group][p // size] * size + p % size
                    for (s, count), at in zip(work, before, strict=True)
                    for p in range(at, at + count)
                ]
            for s, _ in work:
                blocks.commit(s)


def test_extend_makes_the_same_room_as_append() -> None:
    tables = []
    for verb in ("append", "extend"):
        blocks = manager(9, 9, windows=[None, 3])
        a, b = blocks.new_sequence(), blocks.new_sequence()
        getattr(blocks, verb)([(a, 3), (b, 4)])
        getattr(blocks, verb)([(a, 2)])
        tables.append((a.tables, b.tables, a.length, b.length))
    assert tables[0] == tables[1]


def test_no_tokens_take_no_blocks() -> None:
    blocks = manager(2)
    sequence = blocks.new_sequence()
    assert blocks.append([(sequence, 0)]) == [[]]
    assert blocks.append([]) == [[]]
    assert (sequence.length, sequence.tables) == (0, [[]])


def test_append_is_all_or_nothing_over_sequences_and_groups() -> None:
    blocks = manager(9, 4, size=4)
    a, b = blocks.new_sequence(), blocks.new_sequence()
    blocks.append([(a, 5)])
    before = state(blocks)
    assert blocks.can_append([(a, 4)])
    assert blocks.can_append([(b, 8)])
    assert not blocks.can_append([(a, 4), (b, 8)])  # the second group has no room for both
    with pytest.raises(OutOfBlocks, match=r"need 3 blocks, but only 2 of 4 are free and 0 cached; shorten"):
        blocks.append([(a, 4), (b, 8)])
    assert state(blocks) == before


def test_a_sequence_comes_once_and_lives() -> None:
    blocks = manager(3)
    sequence = run(blocks, [1, 2])
    with pytest.raises(ConfigError, match="comes twice"):
        blocks.append([(sequence, 1), (sequence, 1)])
    blocks.free(sequence)
    with pytest.raises(ConfigError, match="freed"):
        blocks.append([(sequence, 1)])
    with pytest.raises(ConfigError, match="freed"):
        blocks.free(sequence)


def forks(blocks: BlockManager, tokens: range, count: int) -> list[Sequence]:
    first = run(blocks, tokens)
    return [first, *(blocks.fork(first) for _ in range(count - 1))]


def test_forks_share_all_blocks_and_all_but_the_last_copy_before_they_write() -> None:
    blocks = manager(20, 20, windows=[None, 4])
    family = forks(blocks, range(5), 3)
    assert [usage.live for usage in blocks.usage()] == [3, 2]
    assert family[1].receipt.shared == family[1].receipt.peak == 3 + 2
    old = [table[-1] for table in family[0].tables]
    slots = blocks.append([(s, 1) for s in family])
    orders = blocks.take_orders()
    assert all(len(set(row)) == 3 for row in slots)
    assert [(o.group, o.source) for o in orders if isinstance(o, Copy)] == [
        (group, old[group]) for group in (0, 0, 1, 1)
    ]
    assert [table[-1] for table in family[2].tables] == old
    assert [s.receipt.copied for s in family] == [2, 2, 0]
    assert blocks.take_orders() == []
    blocks.append([(s, 0) for s in family])
    assert blocks.take_orders() == []


def test_a_fork_that_writes_nothing_copies_nothing() -> None:
    blocks = manager(20)
    first, second = forks(blocks, range(5), 2)
    blocks.free(second)
    blocks.append([(first, 1)])
    assert blocks.take_orders() == []


def test_forks_at_the_end_of_a_block_copy_nothing() -> None:
    blocks = manager(20)
    family = forks(blocks, range(4), 2)
    blocks.append([(s, 1) for s in family])
    assert blocks.take_orders() == []
    assert family[0].tables[0][:2] == family[1].tables[0][:2]


def test_an_indexed_block_is_copied_before_it_is_written_even_by_its_only_user() -> None:
    blocks = manager(6)
    sequence = run(blocks, range(4))
    blocks.truncate(sequence, 3)
    blocks.append([(sequence, 1)])
    assert blocks.take_orders() == [Copy(group=0, source=1, target=2)]
    assert hit(blocks, range(5)) == 4
    blocks.check_integrity()


def test_only_committed_tokens_are_forked() -> None:
    blocks = manager(6)
    sequence = run(blocks, range(3))
    blocks.append([(sequence, 2)])
    with pytest.raises(ConfigError, match="can't fork a sequence with 2 tokens that were appended and not"):
        blocks.fork(sequence)


def test_a_window_gives_back_what_no_later_token_sees() -> None:
    rng = random.Random(4)
    for _ in range(100):
        size, window = rng.randint(1, 4), rng.randint(1, 9)
        blocks = manager(40, size=size, windows=[window])
        sequence = blocks.new_sequence()
        while sequence.length < 25:
            blocks.append([(sequence, rng.randint(1, 5))])
            blocks.commit(sequence)
            seen = {p // size for p in range(max(0, sequence.length + 1 - window), sequence.length)}
            first = min(seen, default=sequence.length // size)
            assert sequence.starts == [min(first, len(sequence.tables[0]))]
            assert blocks.usage()[0].live == len(sequence.tables[0]) - sequence.starts[0]


def test_truncating_frees_the_blocks_behind_and_forgets_the_tokens() -> None:
    blocks = manager(9)
    sequence = run(blocks, range(7))
    blocks.truncate(sequence, 3)
    assert (sequence.length, sequence.committed, sequence.depth) == (3, 3, 1)
    assert list(sequence.tokens) == [0, 1, 2]
    assert [(u.live, u.cached, u.free) for u in blocks.usage()] == [(2, 1, 6)]
    compute(blocks, sequence, [9])
    compute(blocks, sequence)
    assert hit(blocks, [0, 1, 2, 9, 5]) == 4
    assert hit(blocks, [0, 1, 2, 3, 4, 5, 6]) == 6
    blocks.truncate(sequence, 0)
    assert blocks.usage()[0].live == 0
    blocks.check_integrity()


def test_rejected_drafts_leave_the_known_tokens() -> None:
    blocks = manager(9)
    sequence = run(blocks, range(3))
    blocks.append([(sequence, 4)])
    blocks.truncate(sequence, 4)
    assert list(sequence.tokens) == [0, 1, 2]
    blocks.commit(sequence, [3, 4])
    assert hit(blocks, range(9)) == 4
    assert len(sequence.tables[0]) == 2


def test_a_state_that_is_due_lets_drafts_leave_within_its_block_only() -> None:
    blocks = manager(9, 9, size=4, windows=[None, 2], state_group=1)
    sequence = blocks.start(blocks.prompt(range(2)))
    compute(blocks, sequence, [2])
    blocks.append([(sequence, 3)])  # the known token and two drafts: positions 2, 3 and 4
    before = state(blocks)
    for length, is_due in (
        (3, False),
        (4, False),
        (3, True),
        (4, True),
    ):  # the last one lies in the next block
        with pytest.raises(ConfigError, match="as a recurrent state, was given back"):
            blocks.truncate(sequence, length, state_is_due=is_due)
    assert state(blocks) == before
    blocks.truncate(sequence, 2)  # over an append that was not run
    blocks.append([(sequence, 2)])
    held = sequence.held_in(1)
    with pytest.raises(ConfigError, match="recurrent state"):
        blocks.truncate(sequence, 3)
    blocks.truncate(sequence, 3, state_is_due=True)
    assert (sequence.length, sequence.held_in(1)) == (3, held)
    blocks.commit(sequence, [3])
    blocks.check_integrity()


def test_truncating_is_refused_where_a_window_gave_back_what_would_be_seen() -> None:
    blocks = manager(9, 9, windows=[None, 4])
    sequence = run(blocks, range(10))
    before = state(blocks)
    for length in (-1, 11):
        with pytest.raises(ConfigError, match=f"can't truncate 10 tokens to {length}$"):
            blocks.truncate(sequence, length)
    with pytest.raises(
        ConfigError,
        match=r"what is seen there, of a sliding window, .* or as a recurrent state, was given back",
    ):
        blocks.truncate(sequence, 8)
    assert state(blocks) == before
    blocks.truncate(sequence, 9)
    blocks.truncate(sequence, 0)
    assert sequence.starts == [0, 0]


def test_truncating_in_a_later_turn_uses_no_digest_of_the_old_prompt() -> None:
    blocks = manager(20)
    prompt = blocks.prompt(range(8))
    sequence = blocks.start(prompt)
    compute(blocks, sequence)
    blocks.truncate(sequence, 2)
    blocks.commit(sequence, [7, 7])
    compute(blocks, sequence)
    assert hit(blocks, [0, 1, 7, 7, 9]) == 4
    assert hit(blocks, range(9)) == 8
    blocks.check_integrity()


def test_scrubbing_zeroes_what_nobody_else_sees_and_takes_it_out_of_the_index() -> None:
    blocks = manager(12, 12, windows=[None, 4])
    cache(blocks, range(4))
    sequence = run(blocks, range(7))
    blocks.append([(sequence, 2)])
    blocks.take_orders()
    twin_tables = [table[:] for table in sequence.tables]
    blocks.scrub(sequence)
    assert blocks.take_orders() == [
        Scrub(group=group, block=twin_tables[group][i]) for group in (0, 1) for i in (2, 3, 4)
    ]
    blocks.commit(sequence, [1, 1, 1])
    assert hit(blocks, [*range(7), 1, 1, 1]) == 4
    blocks.free(sequence)
    assert hit(blocks, [*range(7), 1, 1, 1]) == 4
    blocks.check_integrity()


def test_a_fork_of_a_scrubbed_sequence_is_not_indexed_either() -> None:
    blocks = manager(12)
    sequence = run(blocks, range(3))
    blocks.scrub(sequence)
    twin = blocks.fork(sequence)
    compute(blocks, twin, [3])
    compute(blocks, twin)
    assert hit(blocks, range(5)) == 0
    blocks.check_integrity()


def test_scrubbing_leaves_what_others_found_first_or_still_use() -> None:
    blocks = manager(12)
    cache(blocks, range(2))
    sequence = run(blocks, range(6))
    other = run(blocks, [*range(4), 9])
    blocks.scrub(sequence)
    assert hit(blocks, range(7)) == 4
    blocks.free(sequence)
    blocks.free(other)
    assert hit(blocks, range(7)) == 4
    blocks.check_integrity()


def test_a_limited_group_has_slots_for_the_first_tokens_only() -> None:
    blocks = manager(9, 9, size=2, limits=[None, 4])
    a, b = blocks.new_sequence(), blocks.new_sequence()
    assert blocks.append([(a, 3), (b, 1)])[1] == [0, 1, 2, 4]
    assert blocks.append([(a, 3), (b, 1)])[1] == [3, -1, -1, 5]
    assert blocks.append([(a, 1), (b, 0)])[1] == [-1]
    assert [len(table) for table in a.tables] == [4, 2]
    assert (a.holds(1, 1), a.holds(1, 2), a.holds(0, 3)) == (True, False, True)
    assert [usage.live for usage in blocks.usage()] == [4 + 1, 2 + 1]


def test_a_full_pool_of_a_limited_group_lets_those_beyond_it_go_on() -> None:
    blocks = manager(20, 2, size=2, limits=[None, 4])
    sequence = run(blocks, range(4))
    blocks.append([(sequence, 9)])
    other = blocks.new_sequence()
    assert not blocks.can_append([(other, 1)])
    with pytest.raises(OutOfBlocks, match="need 1 blocks, but only 0 of 2"):
        blocks.append([(other, 1)])


def test_a_limited_groups_blocks_stay_when_windows_move_and_are_copied_below_the_limit_only() -> None:
    blocks = manager(20, 20, 20, size=2, windows=[None, 4, None], limits=[None, None, 4])
    sequence = run(blocks, range(3))
    twin = blocks.fork(sequence)
    blocks.append([(sequence, 1), (twin, 1)])
    copied = [order.group for order in blocks.take_orders() if isinstance(order, Copy)]
    assert copied == [0, 1, 2]  # the second block, half full, in every group
    blocks.commit(sequence, [3])
    blocks.free(twin)
    blocks.append([(sequence, 9)])
    blocks.commit(sequence, range(4, 13))
    assert sequence.starts == [0, 5, 0]
    twin = blocks.fork(sequence)
    blocks.append([(sequence, 1), (twin, 1)])
    copied = [order.group for order in blocks.take_orders() if isinstance(order, Copy)]
    assert copied == [0, 1]
    assert blocks.usage()[2].live == 2
    blocks.check_integrity()


@pytest.mark.parametrize(("length", "left"), [(9, 2), (5, 2), (4, 2), (3, 2), (2, 1), (1, 1), (0, 0)])
def test_truncating_gives_back_a_limited_groups_blocks_below_its_limit(length: int, left: int) -> None:
    blocks = manager(9, 9, size=2, limits=[None, 4])
    sequence = run(blocks, range(9))
    blocks.truncate(sequence, length)
    assert len(sequence.tables[1]) == blocks.usage()[1].live == left
    slots = blocks.append([(sequence, 5)])[1]
    assert slots.count(-1) == max(0, min(5, length + 5 - 4))
    blocks.check_integrity()


def test_utilization_counts_no_empty_slots_beyond_a_limit() -> None:
    blocks = manager(9, 9, size=4, limits=[None, 4])
    sequence = blocks.new_sequence()
    blocks.append([(sequence, 3)])
    assert blocks.utilization() == 6 / 8
    blocks.append([(sequence, 2)])
    assert blocks.utilization() == (5 + 4) / (8 + 4)


def test_scrubbing_zeroes_a_limited_groups_blocks_too() -> None:
    blocks = manager(9, 9, size=2, limits=[None, 2])
    sequence = blocks.new_sequence()
    blocks.append([(sequence, 5)])
    blocks.scrub(sequence)
    assert blocks.take_orders() == [
        *(Scrub(group=0, block=block) for block in sequence.tables[0]),
        Scrub(group=1, block=sequence.tables[1][0]),
    ]
