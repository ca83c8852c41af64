"""Tuning of Linear layers: what can be checked without a GPU."""

from dataclasses import replace

import pytest
import torch

from benchmarks import linear_tiles
from benchmarks.instructions import tune as counting
from benchmarks.instructions.tune import Place, chosen, tried
from benchmarks.linear_tiles import candidates, tune_linear
from kvq.bench.kernels.linear import LinearWorkload
from kvq.bench.kernels.tune import axes, cheapest, search
from kvq.errors import KVQError
from kvq.kernels.gpu import shapes
from kvq.kernels.gpu.shapes import TileShape
from kvq.kernels.linear import tiles
from kvq.kernels.linear.cpu import CpuLinear

START = TileShape(rows=16, keys=32, warps=1, stages=2)


@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_one_axis_after_another_is_varied_from_the_best_so_far(kind: str) -> None:
    def cost(tile: TileShape) -> tuple[float, ...] | None:
        if tile.stages == 6:
            return None
        return (abs(tile.keys - 64) + abs(tile.warps - 4), abs(tile.stages - 7), tile.registers or 255)

    found = search(axes(kind), START, cost)
    best = cheapest(found)
    assert best == replace(best, keys=64, warps=4, stages=7, registers=128)
    assert None in found.values()
    assert len(found) <= 1 + sum(map(len, axes(kind))) < 20
    assert {tile.stages for tile in found} == set(range(2, 8))
    assert cheapest({START: None}) is None


SLOTS = {"slots_a_key": {"h100": 60.0, "h200": 45.0}}
PRESENT = {"us": {"few": 100.0, "many": 200.0}, "instructions_a_key": 20.0, **SLOTS}


@pytest.mark.parametrize(
    ("us", "replaces"),
    [
        ({"few": 100.0, "many": 180.0}, True),
        ({"few": 99.0, "many": 195.0}, False),  # not clearly
        ({"few": 101.0, "many": 150.0}, False),  # slower if it is few
        ({}, False),
    ],
)
def test_the_present_shape_stays_unless_another_is_never_slower_and_clearly_faster_once(
    us: dict[str, float], replaces: bool
) -> None:
    other = {"us": us, "instructions_a_key": 30.0, **SLOTS}
    assert chosen([PRESENT, other], PRESENT) is (other if replaces else PRESENT)
    heavy = other | {"instructions_a_key": 31.0}  # leaves less than a third of the H200's slots
    assert chosen([PRESENT, heavy], PRESENT) is PRESENT


def test_any_shape_that_can_run_takes_the_place_of_one_that_is_refused() -> None:
    refused, other = {"us": {}, "instructions_a_key": 5.0, **SLOTS}, PRESENT
    assert chosen([refused, other], refused) is other
    assert chosen([refused], refused) is refused


def test_shapes_are_counted_for_their_own_place_and_what_spills_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler is left out: more warps are fewer instructions, one tile spills more than the
    share of its loop that may be, and all others exactly that much."""

    def counted(asked: object) -> dict:
        cut, warps = asked.arguments, asked.options["num_warps"]  # type: ignore[attr-defined]
        assert (cut["BLOCK_SIZE"], cut["k"].dim.value) == (32, 64)
        return {
            **{"kv": "int8", "device": "sm89", "kernel": "attend decode", "warps": warps},
            **{"rows": cut["ROWS"], "keys": cut["KEYS"], "key_bytes": 132, "awaited_loads": 0},
            **{"loop_instructions": 4000 // warps, "instructions_a_key": 4000 / cut["KEYS"]},
            "instructions": 4000 // warps + 1000,
            **{"slots_a_key": {"rtx-4090": 300.0}},
            **{"programs_at_once": 12 // warps or 1, "tiles_under_way": 1.0},
            "kinds": {"spill": 16} if warps == 4 and cut["KEYS"] == 64 else {"spill": 60 // warps},
        }

    monkeypatch.setattr(counting, "counted", counted)
    place = Place("decode", "int8", 64, "sm89", 32)
    assert place.key == "decode int8/int8 64 sm89 blocks 32"
    rows = tried(place, [])
    [best] = [row for row in rows if row["chosen"]]
    assert all(not row["us"] for row in rows if row["tile"]["keys"] == 64 and row["tile"]["warps"] == 4)
    assert {name.partition(",")[0] for name in best["us"]} == {"rtx-4090"}
    assert best["tile"]["keys"] == 128
    assert sum(row["present"] for row in rows) == 1
    monkeypatch.setattr(counting, "counted", None)
    assert tried(place, rows) == rows, "what was counted before is not compiled again"
    assert shapes.entries().get(place.key) is None


@pytest.mark.parametrize("rows", [*tiles.ROW_CLASSES, tiles.MANY_ROWS])
def test_tiles_to_try_are_of_their_class_and_differ(rows: int) -> None:
    tried = candidates(rows)
    assert len(tried) == len(set(tried)) > 10
    if rows != tiles.MANY_ROWS:
        assert {x.rows for x in tried} == {rows}, "one tile is as high as the step"


def test_the_fastest_tile_of_those_that_are_right_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is a CPU's, which has no tiles: what is tested is the choice."""
    workload = LinearWorkload(
        out_features=8,
        in_features=64,
        rows=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend="cpu",
    )
    monkeypatch.setattr("kvq.bench.kernels.measure.cache_bytes", lambda _: 1 << 12)
    few = candidates(16)[:2]
    monkeypatch.setattr(linear_tiles, "candidates", lambda _: few)
    key, best, rows = tune_linear(workload, "int8", repeats=3)
    assert key == "linear int8 16 interpreter"
    assert best == min(zip(few, rows, strict=True), key=lambda pair: pair[1]["ms_median"])[0]
    product = CpuLinear.__call__
    monkeypatch.setattr(CpuLinear, "__call__", lambda *arguments: 1.01 * product(*arguments))
    with pytest.raises(KVQError, match="nothing was tuned"):
        tune_linear(workload, "int8")
