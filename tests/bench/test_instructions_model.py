"""The model of attention's time reproduces what was published, and each of its limits can be reached."""

from dataclasses import replace

import pytest

from benchmarks.gpu.goals import Goal
from benchmarks.instructions.cards import CARDS
from benchmarks.instructions.model import (
    CYCLES,
    FEW,
    KV_HEADS,
    MANY,
    READ_SHARE,
    Loop,
    Machine,
    attention_us,
    expected,
    fitted,
    published_us,
    tables,
    tile_us,
)

H200 = next(card for card in CARDS if card.name == "h200")
MACHINE = Machine(cycles=6.0, latency_us=1.0, sharpness=64.0)  # nearly the largest limit alone
LOOP = Loop(
    **{"kv": "bf16", "instructions": 500, "half_rate": 100, "warps": 4, "keys": 64, "key_bytes": 512},
    **{"programs_at_once": 3, "tiles_under_way": 3.0, "awaits_loads": False},
)


@pytest.mark.parametrize("cycles", CYCLES)
def test_the_fit_reproduces_both_published_slopes(cycles: float) -> None:
    machine = fitted(cycles)
    assert 0 < machine.latency_us < 2
    for published in (FEW, MANY):
        assert published_us(published, machine) == pytest.approx(published.key_us, rel=1e-6)


def test_one_published_slope_predicts_the_other_within_15_percent() -> None:
    """Latency is fitted to few programs; how sharp transitions are hardly matters to many."""
    for cycles in CYCLES:
        for sharpness in (2.0, 4.0, 8.0):
            predicted = published_us(MANY, fitted(cycles)._replace(sharpness=sharpness))
            assert predicted == pytest.approx(MANY.key_us, rel=0.15)


def test_slopes_are_those_of_steps() -> None:
    step_us = {tokens: 1e6 / rate for tokens, rate in MANY.tokens_per_s.items()}
    ends = (step_us[32_000] - step_us[1000]) / 31_000 / MANY.layers
    assert MANY.key_us == pytest.approx(ends, rel=0.05)


def test_what_asks_for_little_else_reads_at_full_bandwidth() -> None:
    light = replace(LOOP, instructions=20, half_rate=0)
    us = attention_us(light, H200, MACHINE, 64, 8192)
    read_us = 64 * 8192 * KV_HEADS * 512 / (READ_SHARE * H200.bandwidth) * 1e6
    assert read_us < us < 1.1 * read_us  # starts are the rest


@pytest.mark.parametrize(
    "worse",
    [
        {"instructions": 1500},
        {"half_rate": 450},
        {"tiles_under_way": 0.0},
        {"awaits_loads": True},
        {"key_bytes": 1024},
        {"programs_at_once": 1},
    ],
)
def test_nothing_that_costs_more_is_faster(worse: dict) -> None:
    for machine in (MACHINE, fitted(CYCLES[0])):
        loop = replace(LOOP, key_bytes=144, instructions=800, programs_at_once=8)
        before = attention_us(loop, H200, machine, 64, 8192)
        assert attention_us(replace(loop, **worse), H200, machine, 64, 8192) > 1.02 * before


def test_every_limit_decides_somewhere() -> None:
    clock = H200.clock_ghz * 1e3
    alone = replace(LOOP, tiles_under_way=0.0, awaits_loads=True)
    assert tile_us(alone, H200, MACHINE, 1) == pytest.approx(500 * 6 / clock + 2, rel=0.02)
    many = 132 * 8
    issued = replace(LOOP, key_bytes=16)
    assert tile_us(issued, H200, MACHINE, many) == pytest.approx(8 * 500 / clock, rel=0.02)
    halved = replace(issued, half_rate=400)
    assert tile_us(halved, H200, MACHINE, many) == pytest.approx(8 * 800 / clock, rel=0.02)
    hidden = replace(LOOP, tiles_under_way=2.0, instructions=50, half_rate=0)
    assert tile_us(hidden, H200, MACHINE, 1) == pytest.approx(0.5, rel=0.02)


def test_goals_are_expected_where_they_are_met_by_more_than_the_models_error() -> None:
    least, most = Goal("", 2.0, lambda _: None), Goal("", 2.0, lambda _: None, at_most=True)
    for values, if_least, if_most in (
        ([2.4, 2.8], "yes", "no"),
        ([2.2, 2.8], "open", "open"),
        ([1.5, 2.8], "open", "open"),
        ([1.5, 1.8], "open", "open"),
        ([1.5, 1.7], "no", "yes"),
    ):
        assert (expected(least, values), expected(most, values)) == (if_least, if_most)


def test_tables_judge_the_goals_that_the_model_has_figures_for() -> None:
    light = replace(LOOP, instructions=60, half_rate=0)
    heavy = replace(light, kv="fp8", key_bytes=260, instructions=2000)
    times, found = tables([light, heavy], H200)
    assert len(times) == 5
    told = {goal: met for goal, _, met in found[1:]}
    assert told["decode 1 x 131,072: bf16, share of bandwidth: at least 0.75"] == "yes"
    assert told["decode 64 x 8,192: fp8, speedup over bf16: at least 1.75"] == "no"
    assert len(told) == 3
