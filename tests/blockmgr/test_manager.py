"""The manager as a whole: receipts, utilization, eviction order, growth, bad configuration."""

import random
from typing import Any

import pytest

from kvq.blockmgr import BlockManager, PoolUsage
from kvq.errors import ConfigError, RequestError
from tests.blockmgr.drive import random_simulation, random_step
from tests.blockmgr.helpers import cache, compute, hit, manager, run
from tests.blockmgr.state import state


def test_a_cached_prefix_survives_while_blocks_are_free_elsewhere() -> None:
    blocks = manager(10)
    cache(blocks, range(6))
    sequence = blocks.new_sequence()
    blocks.append([(sequence, 14)])
    assert hit(blocks, range(7)) == 6
    blocks.append([(sequence, 2)])
    assert hit(blocks, range(7)) == 4  # the deepest block went first


def test_prefixes_go_oldest_first_and_deeper_blocks_before_their_prefix() -> None:
    blocks = manager(8)
    cache(blocks, [*range(4), 10, 11])
    cache(blocks, [*range(4), 20, 21])
    cache(blocks, range(50, 54))
    run(blocks, range(4))  # in use again
    hog = blocks.new_sequence()
    left = []
    for _ in range(6):
        prompts = [*range(4), 10, 11, 9], [*range(4), 20, 21, 9], [*range(50, 54), 9]
        left.append([hit(blocks, tokens) for tokens in prompts])
        blocks.append([(hog, 2)])
    assert left == [[6, 6, 4]] * 3 + [[4, 6, 4], [4, 4, 4], [4, 4, 2]]


def test_a_receipt_counts_bytes_by_the_size_of_each_groups_blocks() -> None:
    blocks = manager(20, 20, windows=[None, 4], block_bytes=[10, 1000])
    sequence = blocks.new_sequence()
    most = 0
    for count in (6, 1, 1, 1, 1, 9, 20):  # once 4 + 3 blocks of 2 tokens are held, in the end 20 + 12
        blocks.append([(sequence, count)])
        full, window = (len(held) for held in sequence.held)
        most = max(most, 10 * full + 1000 * window)
        assert sequence.receipt.peak_bytes == most
        blocks.commit(sequence)
    twin = blocks.fork(sequence)
    assert twin.receipt.peak_bytes == 10 * 20 + 1000 * 2
    both = blocks.free(twin)
    both.add(blocks.free(sequence))
    assert (both.peak, both.peak_bytes) == (20 + 12, most)


def test_a_receipt_says_what_a_request_used() -> None:
    blocks = manager(20, 20, windows=[None, 4])
    cache(blocks, range(6))
    sequence = blocks.start(blocks.prompt([*range(5), 9, 9, 9]))
    r = sequence.receipt
    assert (r.shared, r.reused, r.own, r.copied, r.peak) == (2 + 2, 5, 2, 2, 6)
    compute(blocks, sequence)
    assert (r.own, r.copied, r.peak) == (2 + 2, 2, 8)
    final = blocks.free(sequence)
    assert final == r
    assert final is not r
    assert (final.recomputed, final.reused) == (0, 5)


def brute_utilization(blocks: BlockManager) -> float:
    """Tokens in live blocks / their slots, slot by slot."""
    slots = used = 0
    for group, pool in enumerate(blocks.pools):
        if group == blocks.blocks.state_group:
            continue
        filled: dict[int, int] = {}
        for s in blocks.sequences():
            for i, block in enumerate(s.tables[group][s.starts[group] :], start=s.starts[group]):
                n = min(blocks.block_size, s.length - i * blocks.block_size)
                filled[block] = max(n, filled.get(block, 0))
        for block in pool.held():
            slots += blocks.block_size
            used += blocks.block_size if pool.entry(block) is not None else filled[block]
    return used / slots if slots else 1.0


@pytest.mark.parametrize("seed", range(6))
def test_utilization_is_the_share_of_live_slots_that_hold_tokens(seed: int) -> None:
    rng = random.Random(seed)
    sim = random_simulation(rng)
    for _ in range(1000):
        random_step(sim, rng)
        assert sim.manager.utilization() == pytest.approx(brute_utilization(sim.manager), abs=1e-12)


def test_a_rewound_fork_leaves_its_twins_tokens_counted() -> None:
    blocks = manager(9, size=4)
    first = blocks.new_sequence()
    blocks.append([(first, 8)])
    blocks.commit(first)  # its tokens are not known, so nothing is indexed
    twin = blocks.fork(first)
    blocks.truncate(twin, 5)
    assert blocks.utilization() == 1.0
    blocks.truncate(first, 6)
    assert blocks.utilization() == 6 / 8


def test_pools_grow_while_requests_run() -> None:
    blocks = manager(2, 3)
    sequence = run(blocks, range(4))
    assert not blocks.can_append([(sequence, 1)])
    blocks.grow([3, 3])
    assert blocks.append([(sequence, 1)]) == [[4], [4]]
    assert blocks.usage() == [PoolUsage(free=0, cached=0, live=3, total=3)] * 2
    with pytest.raises(ConfigError, match=r"pools can only grow, from \[3, 3\] blocks, got \[4, 2\]"):
        blocks.grow([4, 2])
    assert blocks.usage()[0].total == 3
    blocks.check_integrity()


def test_dropping_the_cache_leaves_live_and_pinned_blocks() -> None:
    blocks = manager(12, 12, windows=[None, 4])
    cache(blocks, range(6))
    cache(blocks, range(10, 14))
    blocks.pin(blocks.prompt(range(10, 14)), 1.0)
    run(blocks, range(3))
    blocks.drop_cached()
    assert [usage.cached for usage in blocks.usage()] == [0, 0]
    assert hit(blocks, range(7)) == 2
    assert hit(blocks, range(10, 15)) == 4


def test_orders_are_handed_out_once() -> None:
    blocks = manager(9)
    cache(blocks, range(4))
    blocks.start(blocks.prompt([0, 9, 9]))
    assert len(blocks.take_orders()) == 1
    assert blocks.take_orders() == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_size": 0}, "block_size must be at least 1 token, got 0"),
        ({"num_blocks": [0, 4]}, "at least one block, got 0"),
        ({"windows": [None]}, "one entry per layer group, got 1 and 2"),
        ({"windows": [None, 0]}, "a window must be at least 1 token"),
        ({"limits": [4]}, "limits and num_blocks need one entry per layer group, got 1 and 2"),
        ({"limits": [0, None]}, "a limit must be a positive multiple of the block size 2, or None, got 0"),
        ({"limits": [-2, None]}, "a limit must be a positive multiple"),
        ({"limits": [3, None]}, "a limit must be a positive multiple"),
        ({"limits": [None, 2]}, "first 2 tokens or a window of the last 4, not both"),
        ({"reserve_blocks": -1}, "reserve_blocks must be at least 0 and less than every pool's"),
        ({"max_pinned_blocks": -1}, "max_pinned_blocks must be at least 0"),
    ],
)
def test_a_bad_configuration_is_refused(change: dict[str, Any], reason: str) -> None:
    good: dict[str, Any] = {"num_blocks": [4, 4], "block_size": 2, "windows": [None, 4]}
    BlockManager(**good)
    with pytest.raises(ConfigError, match=reason):
        BlockManager(**{**good, **change})


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="BlockManager has no option 'window'"):
        BlockManager(num_blocks=[4], block_size=2, window=[4])  # type: ignore[call-arg]


def test_wrong_use_is_refused_and_changes_nothing() -> None:
    blocks, others = manager(6), manager(6)
    sequence, foreign = run(blocks, [1, 2, 3]), run(others, [1, 2, 3])
    before = state(blocks)
    for wrong, message in (
        (lambda: blocks.append([(sequence, -1)]), "can't append -1 tokens; truncate drops some"),
        (lambda: blocks.extend([(sequence, -1)]), "can't append -1 tokens"),
        (lambda: blocks.append([(foreign, 1)]), "another manager's"),
        (lambda: blocks.commit(foreign), "another manager's"),
        (lambda: blocks.free(foreign), "another manager's"),
        (
            lambda: blocks.start(manager(6, size=3).prompt([1])),
            "prepared for blocks of 3 tokens, these have 2",
        ),
        (lambda: blocks.lookup(manager(6, size=3).prompt([1])), "prepared for blocks of 3 tokens"),
        (lambda: blocks.pin(blocks.prompt([1, 2]), float("nan")), "a pin needs a time to end"),
        (lambda: blocks.pin(blocks.prompt([1, 2]), float("inf")), "a pin needs a time to end"),
    ):
        with pytest.raises(ConfigError, match=message):
            wrong()
        assert state(blocks) == before
    for tokens in (b"text", "text", bytearray(4), [1.5], [-1], [1 << 32]):
        with pytest.raises(RequestError, match="whole numbers"):
            blocks.prompt(tokens)


def test_the_lists_of_a_configuration_are_copied() -> None:
    windows, limits = [None], [None]
    blocks = BlockManager(num_blocks=[6], block_size=2, windows=windows, limits=limits)
    windows[0], limits[0] = 1, 99
    run(blocks, range(5))
    blocks.check_integrity()
