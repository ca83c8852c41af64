"""Costs of steps: found again where they are known, measured, and read by the simulator."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvq.bench.step_costs import fit_costs
from kvq.cli import main
from kvq.models import Model


def steps(number: int, noise: float = 0.0) -> list[SimpleNamespace]:
    """Of an engine with a fixed cost, one a token beyond 32, and those of attention and sequences."""
    rng = random.Random(0)
    made = []
    for _ in range(number):
        decodes = rng.randint(0, 40)
        prefill = 0 if decodes and rng.random() < 0.7 else rng.randint(1, 200)
        context, pairs = decodes * rng.randint(50, 500), prefill * rng.randint(1, 300)
        sampled = decodes + (prefill > 0)
        seconds = 5e-3 + 1e-4 * max(0, decodes + prefill - 32)
        seconds += 2e-7 * context + 3e-8 * pairs + 1e-5 * sampled
        made.append(
            SimpleNamespace(
                decode_tokens=decodes,
                prefill_tokens=prefill,
                decode_context=context,
                prefill_context=pairs,
                sampled=sampled,
                seconds=seconds * (1 + noise * rng.uniform(-1, 1)),
            )
        )
    return made


@pytest.mark.parametrize(("noise", "off"), [(0.0, 0.02), (0.1, 0.15)])
def test_known_costs_are_found_again(tiny: Model, noise: float, off: float):
    costs = fit_costs(steps(2000, noise), tiny)
    linear = dict(costs["linear"])
    assert linear[16] == pytest.approx(5e-3, rel=max(off, 0.05))
    assert linear[128] == pytest.approx(5e-3 + 96e-4, rel=off)
    assert costs["read_s"] == pytest.approx(2e-7, rel=max(off, 0.1))
    assert costs["pair_s"] == pytest.approx(3e-8, rel=max(off, 0.3))


def test_nothing_costs_less_than_nothing(tiny: Model):
    costs = fit_costs(steps(60, noise=0.9), tiny)
    if costs is not None:
        assert min(costs["read_s"], costs["pair_s"], costs["sequence_s"]) >= 0
        assert all(seconds > 0 for _, seconds in costs["linear"])


def test_too_few_steps_say_nothing(tiny: Model):
    assert fit_costs(steps(20), tiny) is None


def test_what_a_benchmark_measured_is_what_a_simulation_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    results, sheet, simulated = (tmp_path / name for name in ("r.json", "gpus.json", "s.json"))
    load = ["--requests", "40", "--input-len", "8:64", "--output-len", "8:32"]
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "bench",
                "engine",
                "--kv",
                "int4",
                *load,
                "--rate",
                "60",
                "--repeats",
                "1",
                "--step-costs",
                "--json",
                str(results),
            ]
        )
    assert not ended.value.code
    (row,) = json.loads(results.read_text())["rows"]
    assert row["step_costs"]["linear"][0][1] > 1e-4
    gpu = {"memory_gb": 8, "bandwidth_tb_s": 2, "usd_per_hour": 1, "tflops": {"fp16": 50}}
    sheet.write_text(json.dumps({"format_version": 1, "gpus": {"this-cpu": gpu}}))
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "simulate",
                "--model",
                "tiny",
                "--gpu",
                "this-cpu",
                "--gpus",
                str(sheet),
                "--kv",
                "int4",
                *load,
                "--weights",
                "fp32",
                "--rate",
                "60",
                "--calibrate",
                str(results),
                "--json",
                str(simulated),
            ]
        )
    assert not ended.value.code, capsys.readouterr().err
    (found,) = json.loads(simulated.read_text())["rows"]
    assert found["served"] == 40
    assert row["itl_ms_p50"] / 4 < found["itl_ms_p50"] < row["itl_ms_p50"] * 4
