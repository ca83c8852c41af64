"""The pool: free, cached and live blocks against a plain model, and what its check catches."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.blockmgr import BlockId, BlockPool
from kvq.errors import ConfigError, OutOfBlocks

VERBS = ["allocate", "share", "release", "keep", "drop_cached", "grow"]
STEPS = st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 9)), min_size=1, max_size=80)


class Model:
    """A pool as two lists and two dictionaries."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.cached: list[int] = []  # least recently used first
        self.refs: dict[int, int] = {}
        self.kept: set[int] = set()

    def allocate(self, count: int) -> list[int]:
        lacking = max(0, count - len(self.free))
        self.kept -= set(self.cached[:lacking])
        self.free += self.cached[:lacking]
        del self.cached[:lacking]
        taken = self.free[:count]
        del self.free[:count]
        self.refs.update(dict.fromkeys(taken, 1))
        return taken

    def release(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block]:
            del self.refs[block]
            (self.cached if block in self.kept else self.free).append(block)

    def share(self, block: int) -> None:
        self.refs[block] = self.refs.get(block, 0) + 1
        if block in self.cached:
            self.cached.remove(block)


def apply(pool: BlockPool, model: Model, verb: str, number: int) -> None:
    """One operation on both."""
    live, shareable = sorted(model.refs), sorted({*model.refs, *model.cached})
    if verb == "allocate":
        fits = number <= len(model.free) + len(model.cached)
        if fits:
            pool.check_room(number)
            assert pool.allocate(number) == model.allocate(number)
        else:
            with pytest.raises(OutOfBlocks, match=f"need {number} blocks, but only {len(model.free)} of"):
                pool.allocate(number)
    elif verb == "share" and shareable:
        block = shareable[number % len(shareable)]
        pool.share(BlockId(block))
        model.share(block)
    elif verb == "release" and live:
        block = live[number % len(live)]
        pool.release(BlockId(block))
        model.release(block)
    elif verb == "keep" and (bare := sorted(model.refs.keys() - model.kept)):
        pool.keep(BlockId(bare[number % len(bare)]), f"entry {bare[number % len(bare)]}")
        model.kept.add(bare[number % len(bare)])
    elif verb == "drop_cached" and number == 0:
        pool.drop_cached()
        model.free += model.cached
        model.kept -= set(model.cached)
        model.cached = []
    elif verb == "grow" and pool.num_blocks < 12:
        model.free += range(pool.num_blocks, pool.num_blocks + number % 3)
        pool.grow(pool.num_blocks + number % 3)


@settings(derandomize=True, deadline=None, database=None, max_examples=200)
@given(num_blocks=st.integers(1, 9), steps=STEPS)
def test_random_operations_agree_with_a_plain_model(num_blocks: int, steps: list[tuple[str, int]]) -> None:
    pool, model = BlockPool(num_blocks), Model(num_blocks)
    for verb, number in steps:
        apply(pool, model, verb, number)
        blocks = [BlockId(i) for i in range(pool.num_blocks)]
        assert [pool.references(block) for block in blocks] == [model.refs.get(b, 0) for b in blocks]
        assert pool.held() == model.refs
        assert pool.cached_blocks() == model.cached
        assert {block for block in blocks if pool.entry(block) is not None} == model.kept
        assert pool.num_indexed() == len(model.kept)
        assert [b for b in blocks if pool.is_writable(b)] == [
            b for b in blocks if model.refs.get(b) == 1 and b not in model.kept
        ]
        usage = pool.usage()
        assert (usage.free, usage.cached, usage.live) == (
            len(model.free),
            len(model.cached),
            len(model.refs),
        )
        assert usage.free + usage.cached + usage.live == usage.total == pool.num_blocks
        assert pool.num_available == usage.free + usage.cached
        pool.check_integrity()


def test_a_refused_allocation_takes_and_evicts_nothing() -> None:
    pool = BlockPool(5, on_evict=lambda blocks, entries: pytest.fail("evicted"))
    a, _, _ = pool.allocate(3)
    pool.keep(a, "a")
    pool.release(a)
    with pytest.raises(OutOfBlocks, match=r"need 4 blocks, but only 2 of 5 are free and 1 cached; shorten"):
        pool.allocate(4)
    assert (pool.num_free, pool.num_cached, pool.num_live) == (2, 1, 2)


def test_cached_blocks_go_only_when_free_ones_are_used_up_and_oldest_first() -> None:
    evicted: list[tuple[list[int], list[object]]] = []
    pool = BlockPool(4, on_evict=lambda blocks, entries: evicted.append((blocks, entries)) or [])
    for block in pool.allocate(3):
        pool.keep(block, f"entry {block}")
    for block in (1, 0, 2):
        pool.release(BlockId(block))
    pool.share(BlockId(1))  # used again: now the youngest
    pool.release(BlockId(1))
    assert pool.allocate(1) == [3]
    assert not evicted
    assert pool.allocate(2) == [0, 2]
    assert evicted == [([0, 2], ["entry 0", "entry 2"])]


def test_what_cannot_be_found_without_an_evicted_block_goes_with_it() -> None:
    followers = {0: [2], 2: [3]}
    pool = BlockPool(
        5, on_evict=lambda blocks, entries: [BlockId(f) for b in blocks for f in followers.get(b, [])]
    )
    for block in pool.allocate(4):
        pool.keep(block, "entry")
    pool.release_all([BlockId(b) for b in (0, 1, 2, 3)])
    assert pool.allocate(2) == [4, 0]
    assert pool.cached_blocks() == [1]
    assert pool.num_free == 2
    pool.check_integrity()


def test_a_pool_grows_and_never_shrinks() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool.grow(4)
    assert pool.allocate(2) == [2, 3]
    with pytest.raises(ConfigError, match="a pool of 4 blocks can't shrink to 3"):
        pool.grow(3)


@pytest.mark.parametrize("count", [0, -1])
def test_a_pool_without_blocks_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"at least one block, got {count}"):
        BlockPool(count)


def test_free_blocks_are_neither_shared_released_nor_kept() -> None:
    pool = BlockPool(3)
    (live,) = pool.allocate(1)
    pool.keep(live, "entry")
    for verb, reason in [
        (lambda: pool.release(BlockId(1)), "no reference to release"),
        (lambda: pool.keep(BlockId(1), "entry"), "is not live"),
        (lambda: pool.keep(live, "entry"), "indexed already"),
        (lambda: pool.share(BlockId(1)), "is free, it can't be shared"),
    ]:
        with pytest.raises(AssertionError, match=reason):
            verb()


CORRUPTIONS: dict[str, Callable[[BlockPool], object]] = {
    "is in the free list twice": lambda p: p._free.append(p._free[0]),
    "is negative": lambda p: p._refs.__setitem__(p._free[0], -1),
    r"free and cached: \[3\]": lambda p: p._cached.add(BlockId(3)),
    r"differ: \[0\]": lambda p: p._free.append(BlockId(0)),  # live and free
    r"differ: \[3\]": lambda p: p._free.popleft(),  # in no state
    r"differ: \[1\]": lambda p: p._refs.__setitem__(1, 0),  # its last reference was lost
    r"differ: \[9\]": lambda p: p._free.append(BlockId(9)),  # no such block
    "block 4 is free and indexed": lambda p: p._entries.__setitem__(4, "entry"),
    "block 2 is cached and not indexed": lambda p: p._entries.__setitem__(2, None),
}


@pytest.mark.parametrize("reason", CORRUPTIONS)
def test_check_integrity_finds(reason: str) -> None:
    pool = BlockPool(5)
    assert pool.allocate(3) == [0, 1, 2]
    pool.keep(BlockId(2), "entry")
    pool.release(BlockId(2))
    pool.check_integrity()
    CORRUPTIONS[reason](pool)
    with pytest.raises(AssertionError, match=reason):
        pool.check_integrity()
