"""Costs of steps: found again where they are known, measured, and read by the simulator."""

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvq.bench.engine.server import KvqServer
from kvq.bench.engine.step_costs import fit_costs
from kvq.cli import main
from kvq.engine import StepStats
from kvq.models import Model


def known_s(step: Any) -> float:
    """Of an engine with a fixed cost, one a token beyond 32, and those of attention and sequences."""
    beyond = max(0, step.decode_tokens + step.prefill_tokens - 32)
    reading = 2e-7 * step.decode_context + 3e-8 * step.prefill_context
    return 5e-3 + 1e-4 * beyond + reading + 1e-5 * step.sampled


def steps(number: int, noise: float = 0.0) -> list[SimpleNamespace]:
    """Of such an engine."""
    rng = random.Random(0)
    made = []
    for _ in range(number):
        decodes = rng.randint(0, 40)
        prefill = 0 if decodes and rng.random() < 0.7 else rng.randint(1, 200)
        step = SimpleNamespace(
            decode_tokens=decodes,
            prefill_tokens=prefill,
            decode_context=decodes * rng.randint(50, 500),
            prefill_context=prefill * rng.randint(1, 300),
            sampled=decodes + (prefill > 0),
        )
        step.seconds = known_s(step) * (1 + noise * rng.uniform(-1, 1))
        made.append(step)
    return made


@pytest.mark.parametrize(("noise", "off"), [(0.0, 0.02), (0.1, 0.15)])
def test_known_costs_are_found_again(tiny: Model, noise: float, off: float):
    costs = fit_costs(steps(2000, noise), tiny)
    linear = dict(costs["linear"])
    assert linear[16] == pytest.approx(5e-3, rel=max(off, 0.05))
    assert linear[128] == pytest.approx(5e-3 + 96e-4, rel=off)
    assert costs["read_s"] == pytest.approx(2e-7, rel=max(off, 0.1))
    assert costs["pair_s"] == pytest.approx(3e-8, rel=max(off, 0.3))


def test_formats_with_recent_tokens_have_costs(tiny: Model):
    staged = tiny.with_kv("int4")
    assert staged.layout.is_staged
    costs = fit_costs(steps(2000), staged)
    assert costs["read_s"] == pytest.approx(2e-7, rel=0.1)
    assert costs["kv_bytes"] == staged.layout.kv_bytes_per_token


def test_nothing_costs_less_than_nothing(tiny: Model):
    costs = fit_costs(steps(60, noise=0.9), tiny)
    if costs is not None:
        assert min(costs["read_s"], costs["pair_s"], costs["sequence_s"]) >= 0
        assert all(seconds > 0 for _, seconds in costs["linear"])


def test_too_few_steps_say_nothing(tiny: Model):
    assert fit_costs(steps(20), tiny) is None


LOAD = ["--requests", "40", "--input-len", "8:64", "--output-len", "8:64", "--rate", "60", "--kv", "int4_g32"]


def ran(*arguments: str) -> dict[str, Any]:
    """The only row of a command's JSON, which is its last argument."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert not ended.value.code
    (row,) = json.loads(Path(arguments[-1]).read_text())["rows"]
    return row


def test_what_a_benchmark_measured_is_what_a_simulation_takes(tmp_path: Path, monkeypatch):
    """Steps of known costs, and ten times as dear ones; what this machine measures is nobody's promise."""
    run_steps = KvqServer.measure_steps

    def timed(*given: Any) -> list[StepStats]:
        return [replace(step, seconds=known_s(step)) for step in run_steps(*given)]

    monkeypatch.setattr(KvqServer, "measure_steps", timed)
    results, dearer, sheet, out = (
        str(tmp_path / name) for name in ("r.json", "d.json", "gpus.json", "s.json")
    )
    measured = ran("bench", "engine", *LOAD, "--repeats", "1", "--step-costs", "--json", results)[
        "step_costs"
    ]
    least_ms = 1e3 * min(seconds for _, seconds in measured["linear"])
    assert least_ms == pytest.approx(5, rel=0.1)
    gpu = {"memory_gb": 8, "bandwidth_tb_s": 2, "usd_per_hour": 1, "tflops": {"fp16": 50}}
    Path(sheet).write_text(json.dumps({"format_version": 1, "gpus": {"this-cpu": gpu}}))
    report = json.loads(Path(results).read_text())
    costs = report["rows"][0]["step_costs"]
    costs |= {name: 10 * costs[name] for name in ("read_s", "pair_s", "sequence_s")}
    costs["linear"] = [[tokens, 10 * seconds] for tokens, seconds in costs["linear"]]
    Path(dearer).write_text(json.dumps(report))
    simulate = [
        "simulate",
        "--model",
        "tiny",
        "--gpu",
        "this-cpu",
        "--gpus",
        sheet,
        "--weights",
        "fp32",
        *LOAD,
    ]
    as_measured, dear = (ran(*simulate, "--calibrate", one, "--json", out) for one in (results, dearer))
    assert as_measured["served"] == dear["served"] == 40
    assert as_measured["itl_ms_p50"] >= least_ms
    assert dear["itl_ms_p50"] > 5 * as_measured["itl_ms_p50"]
