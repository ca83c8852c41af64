"""The pool: against a plain dictionary under random operations, and what its check catches."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.blockmgr import BlockId, BlockPool
from kvq.errors import ConfigError, OutOfBlocks

STEPS = st.lists(
    st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 9)), min_size=1, max_size=80
)


@settings(derandomize=True, deadline=None, database=None, max_examples=80)
@given(num_blocks=st.integers(1, 9), steps=STEPS)
def test_random_operations_agree_with_a_dictionary_of_references(
    num_blocks: int, steps: list[tuple[str, int]]
) -> None:
    pool = BlockPool(num_blocks)
    refs: dict[int, int] = {}
    freed = list(range(num_blocks))  # least recently freed first
    for operation, number in steps:
        live = sorted(refs)
        if operation == "allocate":
            fits = number <= len(freed)
            assert pool.can_allocate(number) == fits
            if fits:
                assert pool.allocate(number) == freed[:number]
                refs.update(dict.fromkeys(freed[:number], 1))
                del freed[:number]
            else:
                with pytest.raises(OutOfBlocks, match=f"need {number} blocks, but only {len(freed)} of"):
                    pool.allocate(number)
        elif live:
            block = live[number % len(live)]
            refs[block] += 1 if operation == "share" else -1
            getattr(pool, operation)(BlockId(block))
            if not refs[block]:
                del refs[block]
                freed.append(block)
        assert [pool.references(BlockId(i)) for i in range(num_blocks)] == [
            refs.get(i, 0) for i in range(num_blocks)
        ]
        assert (pool.num_free, pool.num_live) == (len(freed), len(refs))
        pool.check_integrity()


def test_a_refused_allocation_takes_nothing() -> None:
    pool = BlockPool(5)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks, match=r"need 4 blocks, but only 3 of 5 are free; "):
        pool.allocate(4)
    assert pool.num_free == 3
    assert sorted(pool.allocate(3)) == [2, 3, 4]


def test_the_least_recently_freed_block_is_taken_first() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    for block in (2, 0, 3):
        pool.release(BlockId(block))
    assert pool.allocate(3) == [2, 0, 3]


def test_a_shared_block_is_free_only_after_its_last_release() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.release(block)
    assert (pool.references(block), pool.num_live) == (1, 1)
    pool.release(block)
    assert (pool.references(block), pool.num_live) == (0, 0)


@pytest.mark.parametrize("verb", ["share", "release"])
@pytest.mark.parametrize(
    ("block", "reason"), [(1, "is free"), (-1, "outside the pool"), (2, "outside the pool")]
)
def test_only_live_blocks_are_shared_and_released(verb: str, block: int, reason: str) -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match=reason):
        getattr(pool, verb)(BlockId(block))
    assert [pool.references(BlockId(i)) for i in range(2)] == [1, 0]
    pool.check_integrity()


@pytest.mark.parametrize("count", [0, -1])
def test_a_pool_without_blocks_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"at least one block, got {count}"):
        BlockPool(count)


CORRUPTIONS: dict[str, Callable[[BlockPool], object]] = {
    "is in the free list twice": lambda p: p._free.append(p._free[0]),
    "is negative": lambda p: p._refs.__setitem__(p._free[0], -1),
    r"differ: \[0\]": lambda p: p._free.append(BlockId(0)),  # live and free
    r"differ: \[2\]": lambda p: p._free.popleft(),  # in neither state
    r"differ: \[1\]": lambda p: p._refs.__setitem__(1, 0),  # its last reference was lost
    r"differ: \[9\]": lambda p: p._free.append(BlockId(9)),  # no such block
}


@pytest.mark.parametrize("reason", CORRUPTIONS)
def test_check_integrity_finds(reason: str) -> None:
    pool = BlockPool(5)
    assert pool.allocate(2) == [0, 1]
    pool.check_integrity()
    CORRUPTIONS[reason](pool)
    with pytest.raises(AssertionError, match=reason):
        pool.check_integrity()
