"""Prefix hits: the longest valid one, for every mix of windows, against a search through all blocks."""

import random
from itertools import product

import pytest

from kvq.blockmgr import BlockManager
from kvq.blockmgr.prefix import token_array
from tests.blockmgr.helpers import cache, hit, manager, run
from tests.blockmgr.oracle import hit_length


def lose(blocks: BlockManager, rng: random.Random) -> None:
    """Evict some cached blocks at random, in the order that the pool would."""
    for pool in blocks.pools:
        gone = rng.randint(0, pool.num_cached)
        pool.release_all(pool.allocate(pool.num_free + gone))


@pytest.mark.parametrize(
    ("windows", "limited"),
    [
        ([None], 0), ([3], 0), ([None, 3], 0), ([5, None], 0), ([2, 6], 0), ([None, None], 0), ([1, None], 0),
        ([None, 3, None], 1), ([None, 5, None], 2), ([4, 3, None], 2), ([None], 2),
    ],
)  # fmt: skip
def test_hits_equal_a_search_through_everything_that_is_indexed(
    windows: list[int | None], limited: int
) -> None:
    """`limited`: blocks that the last layer group keeps at most of a sequence; 0 for no limit."""
    rng = random.Random(str(windows))
    lengths = set()
    for _ in range(150):
        size = rng.randint(1, 3)
        limits = [*[None] * (len(windows) - 1), limited * size or None]
        blocks = manager(*[14] * len(windows), size=size, windows=windows, limits=limits)
        for _ in range(4):
            cache(blocks, [rng.randrange(2) for _ in range(rng.randint(1, 12))])
        lose(blocks, rng)
        for _ in range(10):
            prompt = blocks.prompt([rng.randrange(2) for _ in range(rng.randint(0, 12))])
            expected = hit_length(blocks, prompt)
            assert blocks.lookup(prompt).length == expected
            lengths.add(expected)
    assert len(lengths) > 5


@pytest.mark.parametrize("length", range(1, 9))
def test_the_last_token_is_always_computed(length: int) -> None:
    blocks = manager(8)
    cache(blocks, range(8))
    assert hit(blocks, range(length)) == length - 1
    sequence = blocks.start(blocks.prompt(range(length)))
    assert sequence.length == sequence.committed == sequence.receipt.reused == length - 1


def test_an_empty_prompt_hits_nothing() -> None:
    blocks = manager(8)
    cache(blocks, range(8))
    assert hit(blocks, []) == 0
    assert blocks.start(blocks.prompt([])).length == 0


def test_a_part_is_copied_from_the_child_that_shares_most() -> None:
    rng = random.Random(5)
    for _ in range(100):
        blocks = manager(30, size=4)
        known = [[rng.randrange(3) for _ in range(4)] for _ in range(7)]
        for tokens in known:
            cache(blocks, tokens)
        wanted = [rng.randrange(3) for _ in range(5)]
        shared = [
            next((i for i, (a, b) in enumerate(zip(k, wanted, strict=False)) if a != b), 4) for k in known
        ]
        assert hit(blocks, wanted) == max(shared)


def test_a_part_is_found_beside_children_that_lost_a_block_in_another_group() -> None:
    blocks = manager(9, 9, size=4, windows=[None, None])
    for last in (1, 2, 3, 4):
        cache(blocks, [7, 7, last, 0])
    for block in blocks.pools[1].cached_blocks()[1:3]:  # those of 2 and 3
        node = blocks.pools[1].entry(block)
        blocks.blocks.index.forget([node], 1)  # type: ignore[list-item]
        blocks.pools[1]._entries[block] = None
        blocks.pools[1]._cached.remove(block)
        blocks.pools[1]._free.append(block)
    blocks.check_integrity()
    assert hit(blocks, [7, 7, 2, 5, 5]) == 2
    assert hit(blocks, [7, 7, 3, 5, 5]) == 2
    assert hit(blocks, [7, 7, 3, 0, 5]) == 2
    assert hit(blocks, [7, 7, 4, 0, 5]) == 4


def test_a_sliding_group_needs_only_the_last_window() -> None:
    blocks = manager(9, 9, windows=[None, 4])
    cache(blocks, range(12))
    assert hit(blocks, range(13)) == 12
    sequence = blocks.start(blocks.prompt(range(13)))
    assert sequence.starts == [0, 4]  # a token at 12 sees positions 9 to 11
    assert sequence.receipt.shared == 6 + 2


def test_tokens_are_compared_when_digests_are_equal() -> None:
    blocks = manager(40, digest=lambda data: b"the same for all")
    cache(blocks, [1, 2])
    for tokens in product(range(3), repeat=2):
        assert hit(blocks, [*tokens, 9]) == {(1, 2): 2}.get(tokens, 1 if tokens[0] == 1 else 0)
    cache(blocks, [5, 6, 1, 2])  # can't be indexed, and harms nothing
    assert hit(blocks, [1, 2, 9]) == 2
    assert hit(blocks, [5, 6, 1, 2, 9]) == 0
    blocks.check_integrity()


def test_a_collision_at_the_first_block_does_not_take_another_prefix_out_of_the_index() -> None:
    blocks = manager(20, digest=lambda data: b"the same for all")
    late = blocks.start(blocks.prompt([3, 4, 5]))  # started before the index knew any token
    cache(blocks, [1, 2])
    blocks.append([(late, 3)])
    blocks.commit(late)
    assert not late.indexing
    blocks.check_integrity()
    assert hit(blocks, [1, 2, 9]) == 2


def test_forgetting_the_tokens_of_a_collision_frees_the_digest() -> None:
    blocks = manager(20, digest=lambda data: b"the same for all")
    cache(blocks, [1, 2])
    blocks.drop_cached()
    cache(blocks, [3, 4])
    assert hit(blocks, [3, 4, 9]) == 2
    blocks.check_integrity()


@pytest.mark.parametrize("token", [0, 255, 256, 65535, 65536, 2**31, 2**32 - 1])
def test_every_token_id_is_told_from_its_neighbours(token: int) -> None:
    blocks = manager(9)
    cache(blocks, [token, token])
    assert hit(blocks, [token, token, 1]) == 2
    for other in {token - 1, token + 1, token ^ 0xFF} - {-1, 2**32}:
        assert hit(blocks, [token, other, 1]) == 1
        assert hit(blocks, [other, token, 1]) == 0


def test_a_prompt_is_looked_up_again_after_it_was_hashed() -> None:
    blocks = manager(12)
    prompt = blocks.prompt(range(9))
    assert blocks.lookup(prompt).length == 0
    run(blocks, range(9))
    assert blocks.lookup(prompt).length == 8
    assert prompt.tokens == token_array(range(9))
    assert blocks.prefixes.held(prompt) == (8, [0], [[0, 1, 2, 3]])


STAGED = {"windows": [None, 4, None], "limits": [None, None, 4]}


def test_a_hit_needs_all_of_a_limited_groups_blocks_and_none_beyond() -> None:
    blocks = manager(20, 20, 20, **STAGED)
    cache(blocks, range(12))
    assert blocks.usage()[2].cached == 2
    sequence = blocks.start(blocks.prompt(range(13)))
    assert (sequence.length, sequence.starts) == (12, [0, 4, 0])
    assert [len(table) for table in sequence.tables] == [6, 6, 2]
    assert sequence.receipt.shared == 6 + 2 + 2
    blocks.free(sequence)
    pool = blocks.pools[2]
    pool.release_all(pool.allocate(pool.num_free + 1))  # one of the two is given away: the deeper
    assert (pool.num_cached, hit(blocks, range(13))) == (1, 2)
    blocks.check_integrity()


def test_without_a_deep_block_of_a_limited_group_hits_end_before_it() -> None:
    blocks = manager(20, 20, limits=[None, 4])
    cache(blocks, range(12))
    pool = blocks.pools[1]
    pool.release_all(pool.allocate(pool.num_free + 1))
    assert hit(blocks, range(13)) == 2
    cache(blocks, range(5))  # computed again, and known again for all that came after it
    assert hit(blocks, range(13)) == 12


def test_a_part_beyond_a_limit_is_copied_in_the_other_groups() -> None:
    blocks = manager(20, 20, size=4, limits=[None, 4])
    cache(blocks, range(12))
    sequence = blocks.start(blocks.prompt([*range(6), 99]))
    assert sequence.length == 6
    assert [order.group for order in blocks.take_orders()] == [0]  # type: ignore[union-attr]
    assert [len(table) for table in sequence.tables] == [2, 1]
    assert (sequence.receipt.shared, sequence.receipt.own, sequence.receipt.copied) == (2, 1, 1)
    other = blocks.start(blocks.prompt([*range(3), 99]))
    assert other.length == 3
    assert [order.group for order in blocks.take_orders()] == [0, 1]  # type: ignore[union-attr]
    blocks.check_integrity()


def test_can_admit_counts_a_limited_group_up_to_its_limit() -> None:
    blocks = manager(20, 2, limits=[None, 4])
    assert blocks.can_admit(blocks.prompt(range(30)), 30)
    run(blocks, range(2))
    assert not blocks.can_admit(blocks.prompt(range(10, 40)), 3)
    assert blocks.can_admit(blocks.prompt(range(10, 40)), 2)
    assert blocks.can_admit(blocks.prompt([0, 1, *range(10, 40)]), 20)  # its first block is there
