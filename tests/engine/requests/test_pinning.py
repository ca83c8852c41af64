"""Pins of requests: prefixes outlive pressure until their time is over, and make nobody else fail."""

import math

import pytest

from kvq.engine import PrefixPin, SamplingParams
from kvq.engine.requests.request_options import RequestOptions
from kvq.errors import RequestError
from tests.engine.kit import BLOCK, assert_balanced, drive, engine, pair, submit
from tests.helpers_models import random_tokens

POOL = 24  # blocks
PREFIX = random_tokens(3 * BLOCK + 5, seed=7)
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


class Clock:
    """Time that goes on when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["llama", "gemma2"], ids=["full", "with windows"])
def llm(request):
    llm = engine(pair(request.param)[0], num_blocks=POOL)
    llm.core._clock = Clock()
    return llm


def ask(llm, tokens, *lengths, seconds=300.0, params=ONE, **options):
    """Run one request that pins prefixes of these lengths; return its receipt."""
    pins = [PrefixPin(length=length, seconds=seconds) for length in lengths]
    _, collector = submit(llm, tokens, params, pins=pins, **options)
    drive(llm, [collector])
    assert collector.output.error is None
    llm.core.scheduler.manager.check_integrity()
    return collector.output.receipt


def press(llm):
    """Requests that go through the whole pool several times."""
    for seed in range(200, 206):
        ask(llm, random_tokens(10 * BLOCK, seed=seed))


def pinned(llm):
    return llm.core.scheduler.manager.pins.num_pinned(0)


def test_a_pinned_prefix_outlives_what_evicts_others(llm):
    other = random_tokens(3 * BLOCK + 5, seed=8)
    assert ask(llm, PREFIX, len(PREFIX)).pinned_tokens == 3 * BLOCK
    assert ask(llm, other).pinned_tokens == 0
    press(llm)
    assert ask(llm, [*PREFIX, 5, 6]).cached_tokens >= 3 * BLOCK
    assert ask(llm, [*other, 5, 6]).cached_tokens == 0


def test_pins_end_with_their_time_and_asking_again_extends_them(llm):
    clock = llm.core._clock
    ask(llm, PREFIX, len(PREFIX))
    clock.now += 200
    assert ask(llm, [*PREFIX, 9], len(PREFIX)).pinned_tokens == 3 * BLOCK
    clock.now += 299
    press(llm)
    assert ask(llm, [*PREFIX, 5, 6]).cached_tokens >= 3 * BLOCK
    clock.now += 1
    press(llm)
    assert pinned(llm) == 0
    assert ask(llm, [*PREFIX, 5, 6]).cached_tokens == 0
    assert_balanced(llm)


def test_pins_beyond_the_limit_are_left_out_and_the_request_is_served(llm):
    long = random_tokens(14 * BLOCK, seed=9)
    receipt = ask(llm, long, 2 * BLOCK, 14 * BLOCK)
    assert receipt.pinned_tokens == 2 * BLOCK
    assert llm.core.pinning.num_refused == 1
    for seed in range(20, 30):
        assert ask(llm, random_tokens(4 * BLOCK, seed=seed), 4 * BLOCK).generated_tokens == 1
    assert llm.core.pinning.num_refused > 1
    assert 0 < pinned(llm) <= POOL // 2


def test_pins_give_way_before_a_request_fails(llm):
    for seed in range(30, 33):
        ask(llm, random_tokens(4 * BLOCK, seed=seed), 4 * BLOCK)
    assert pinned(llm) == 12
    params = SamplingParams(max_tokens=2 * BLOCK, ignore_eos=True)
    assert ask(llm, random_tokens(14 * BLOCK, seed=34), params=params).generated_tokens == 2 * BLOCK
    assert pinned(llm) == 8


def test_a_prefix_is_pinned_while_its_request_still_runs_and_before_the_last_chunk(llm):
    llm = engine(llm.model, num_blocks=POOL, max_num_seqs=4, max_num_batched_tokens=BLOCK)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    _, collector = submit(llm, PREFIX, params, pins=[PrefixPin(length=BLOCK, seconds=9)])
    llm.step()
    assert pinned(llm) == 1
    assert not collector.pieces
    drive(llm, [collector])
    assert collector.output.receipt.pinned_tokens == BLOCK


def test_tenants_neither_hit_nor_extend_each_others_pins(llm):
    clock = llm.core._clock
    ask(llm, PREFIX, len(PREFIX), tenant="a")
    clock.now += 200
    receipt = ask(llm, PREFIX, len(PREFIX), tenant="b")
    assert (receipt.cached_tokens, receipt.pinned_tokens) == (0, 3 * BLOCK)
    assert pinned(llm) == 6
    clock.now += 101
    press(llm)
    assert pinned(llm) == 3
    assert ask(llm, [*PREFIX, 5], tenant="a").cached_tokens == 0
    assert ask(llm, [*PREFIX, 5], tenant="b").cached_tokens >= 3 * BLOCK


def test_a_broken_step_leaves_no_pins(llm, monkeypatch):
    ask(llm, PREFIX, len(PREFIX))
    _, collector = submit(llm, [3, 4, 5], ONE)
    monkeypatch.setattr(llm.core._chooser, "choose", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.step()
    assert collector.output.error is not None
    assert_balanced(llm)


@pytest.mark.parametrize(
    ("length", "seconds"), [(-1, 1.0), (1 << 31, 1.0), (1.5, 1.0), (1, -1.0), (1, math.inf), (1, 1e9)]
)
def test_pins_out_of_range_are_refused(length, seconds):
    with pytest.raises(RequestError, match="must be a"):
        PrefixPin(length=length, seconds=seconds)


def test_pins_beyond_the_prompt_or_too_many_are_refused(llm):
    for pins in ([PrefixPin(length=4, seconds=1)], [PrefixPin(length=1, seconds=1)] * 17):
        with pytest.raises(RequestError, match="may pin 16 prefixes of its 3 prompt tokens"):
            llm.core.intake.new_job([3, 4, 5], RequestOptions(params=ONE, pins=pins))
