"""Pins: a prefix stays through any pressure until its time is over, within a limit."""

import contextlib
import random

import pytest

from kvq.blockmgr import BlockManager
from kvq.errors import ConfigError, OutOfBlocks
from tests.blockmgr.helpers import cache, hit, manager, run
from tests.blockmgr.state import state


def press(blocks: BlockManager) -> None:
    """Let a request take everything that can be had."""
    sequence = blocks.new_sequence()
    room = min(usage.free + usage.cached for usage in blocks.usage())
    blocks.append([(sequence, room * blocks.block_size)])
    blocks.free(sequence)


def test_a_pin_holds_through_pressure_until_its_time_and_not_longer() -> None:
    blocks = manager(10, 10, windows=[None, 4])
    cache(blocks, range(8))
    assert blocks.pin(blocks.prompt(range(9)), 5.0) == 8
    assert [usage.live for usage in blocks.usage()] == [4, 2]
    press(blocks)
    blocks.drop_cached()
    assert hit(blocks, range(9)) == 8
    assert blocks.expire(4.9) == 0
    assert blocks.expire(5.0) == 1
    assert hit(blocks, range(9)) == 8
    press(blocks)
    assert hit(blocks, range(9)) == 0
    blocks.check_integrity()


def test_pinning_again_extends_and_never_shortens() -> None:
    blocks = manager(10)
    cache(blocks, range(4))
    prompt = blocks.prompt(range(4))
    assert [blocks.pin(prompt, until) for until in (3.0, 5.0, 1.0)] == [4, 4, 4]
    assert len(blocks.pins) == 1
    assert (blocks.expire(4.0), blocks.expire(5.0)) == (0, 1)


def test_a_pin_within_a_pin_ends_by_itself() -> None:
    blocks = manager(10)
    cache(blocks, range(6))
    blocks.pin(blocks.prompt(range(6)), 1.0)
    blocks.pin(blocks.prompt(range(2)), 2.0)
    assert blocks.pins.num_pinned(0) == 3
    assert blocks.expire(1.5) == 1
    press(blocks)
    assert hit(blocks, range(7)) == 2
    blocks.check_integrity()


def test_what_is_not_indexed_is_not_pinned() -> None:
    blocks = manager(10)
    cache(blocks, range(3))
    assert blocks.pin(blocks.prompt([5, 5]), 9.0) == 0
    assert blocks.pin(blocks.prompt([0]), 9.0) == 0
    assert len(blocks.pins) == 0


@pytest.mark.parametrize(("limit", "fits"), [(None, 4), (2, 2), (99, 8), (0, 0)])
def test_pins_hold_at_most_their_limit(limit: int | None, fits: int) -> None:
    blocks = manager(8, max_pinned_blocks=limit)
    cache(blocks, range(16))
    assert blocks.pins.limit(0) == fits
    if fits < 8:
        before = state(blocks)
        with pytest.raises(OutOfBlocks, match=f"pins would hold {fits + 1} of 8 blocks, the limit is {fits}"):
            blocks.pin(blocks.prompt(range(fits * 2 + 2)), 1.0)
        assert state(blocks) == before
    assert blocks.pin(blocks.prompt(range(fits * 2)), 1.0) == fits * 2


def test_pins_of_one_prefix_are_counted_once() -> None:
    blocks = manager(8, max_pinned_blocks=3)
    cache(blocks, range(6))
    blocks.pin(blocks.prompt(range(4)), 1.0)
    assert blocks.pin(blocks.prompt(range(6)), 1.0) == 6
    assert blocks.pins.num_pinned(0) == 3


def test_the_pin_that_ends_first_is_released_first() -> None:
    blocks = manager(8)
    cache(blocks, range(4))
    cache(blocks, range(10, 14))
    blocks.pin(blocks.prompt(range(4)), 2.0)
    blocks.pin(blocks.prompt(range(10, 14)), 1.0)
    assert blocks.pins.release_first()
    blocks.drop_cached()
    assert (hit(blocks, range(5)), hit(blocks, range(10, 15))) == (4, 0)
    blocks.check_integrity()
    assert blocks.expire(1.5) == 0
    assert blocks.expire(2.0) == 1
    assert not blocks.pins.release_first()


def test_what_a_failed_request_computed_does_not_stay_pinned() -> None:
    blocks = manager(8)
    cache(blocks, range(4))
    sequence = run(blocks, range(9))
    blocks.pin(blocks.prompt(range(4)), 1.0)
    blocks.pin(blocks.prompt(range(8)), 1.0)
    blocks.scrub(sequence)
    blocks.free(sequence)
    assert hit(blocks, range(9)) == 4, "what was there before stays"
    assert len(blocks.pins) == 1
    blocks.check_integrity()


def test_requests_share_pinned_blocks_and_leave_them_pinned() -> None:
    blocks = manager(8)
    cache(blocks, range(4))
    blocks.pin(blocks.prompt(range(4)), 1.0)
    blocks.free(run(blocks, range(5)))
    assert blocks.usage()[0].live == 2
    blocks.check_integrity()


def test_a_pin_of_several_holders_ends_with_the_last() -> None:
    blocks = manager(8)
    cache(blocks, range(4))
    nodes = blocks.prefixes.whole(blocks.prompt(range(4)))
    for until, name in ((1.0, "a"), (2.0, "b"), (3.0, None)):
        assert blocks.pins.add(nodes, until, ("", name)) == 4
    blocks.pins.release(nodes[-1], ("", None))
    blocks.pins.release(nodes[-1], ("other", "b"))
    assert blocks.expire(1.5) == 1
    press(blocks)
    assert hit(blocks, range(5)) == 4
    blocks.check_integrity()
    blocks.pins.release(nodes[-1], ("", "b"))
    assert blocks.pins.num_pinned(0) == 0


def test_tenants_share_the_limit() -> None:
    blocks = manager(16, 16, windows=[None, 4])
    for i in range(4):
        cache(blocks, range(10 * i, 10 * i + 4), tenant="a")
        blocks.pin(blocks.prompt(range(10 * i, 10 * i + 4), tenant="a"), 10.0 + i)
    assert blocks.pins.num_pinned(0) == blocks.pins.limit(0) == 8
    cache(blocks, range(10), tenant="b")
    before = state(blocks)
    with pytest.raises(OutOfBlocks, match="the limit is 8"):  # more than half, its share
        blocks.pin(blocks.prompt(range(10), tenant="b"), 1.0)
    assert state(blocks) == before
    assert blocks.pin(blocks.prompt(range(6), tenant="b"), 1.0) == 6
    assert blocks.pins.num_pinned(0) == 7
    assert [pin.until for pin in blocks.pins.all()] == [12.0, 13.0, 1.0], "what ends first made room"
    with pytest.raises(OutOfBlocks):
        blocks.pin(blocks.prompt(range(4), tenant="a"), 1.0)
    blocks.check_integrity()


def test_random_pins_of_tenants_keep_the_limit() -> None:
    rng, blocks = random.Random(3), manager(24, 24, windows=[None, 4])
    for _ in range(600):
        tenant, salt = f"t{rng.randrange(4)}", rng.choice([None, "all"])
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
        cache(blocks, tokens, tenant, salt)
        nodes = blocks.prefixes.whole(blocks.prompt(tokens, tenant=tenant, shared_salt=salt))
        holder = tenant, rng.choice([None, "a", "b"])
        with contextlib.suppress(OutOfBlocks):
            blocks.pins.add(nodes, rng.random(), holder)
        if nodes and rng.random() < 0.3:
            blocks.pins.release(nodes[-1], holder)
        if rng.random() < 0.05:
            blocks.expire(rng.random())
        blocks.check_integrity()
    blocks.expire(1.0)
    assert not len(blocks.pins)
    assert not blocks.pins._tenants
    assert [usage.live for usage in blocks.usage()] == [0, 0]


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_pinned_blocks must be at least 0"):
        manager(8, max_pinned_blocks=-1)
