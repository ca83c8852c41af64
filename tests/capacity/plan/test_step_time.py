"""Efficiencies from measured costs give those costs back."""

import json
from pathlib import Path

import pytest

from kvq.capacity.plan.gpus import Gpu
from kvq.capacity.plan.step_time import StepTime, efficiency, read_efficiency, read_share, roofline
from kvq.capacity.plan.target import make_target
from kvq.errors import ConfigError
from kvq.sizing.memory import kv_layout

GPU = Gpu(name="one", memory_gb=10, bandwidth_tb_s=2, usd_per_hour=1, tflops={"fp16": 400})
TARGET = make_target("llama-3-8b", weights="fp16")
LAYOUT = kv_layout(TARGET.geometry, "int4_g32_s8_rot")
WEIGHTS = 2 * TARGET.parameters.total
READ = read_share(TARGET.parameters, 1)  # embeddings are looked up, not read
COSTS = {
    "linear": [[1, 0.012], [16, 0.013], [256, 0.030], [1024, 0.110]],
    "read_s": 3e-8,
    "pair_s": 1e-8,
    "sequence_s": 2e-5,
    "weight_bytes": WEIGHTS * READ,
    "token_flops": 2 * TARGET.parameters.active,
    "kv_bytes": LAYOUT.kv_bytes_per_token,
    "pair_flops": 2 * 32 * 32 * 256,
}


def measured_on(gpu: Gpu) -> StepTime:
    """The model's steps on a GPU as efficient as the one that was measured."""
    return roofline(TARGET, LAYOUT, gpu, efficiency(COSTS, GPU, source="here"))


def test_the_model_that_was_measured_takes_what_was_measured():
    found = measured_on(GPU)
    for tokens, seconds in COSTS["linear"]:
        assert found.linear_s(tokens) == pytest.approx(seconds)
    assert found.linear_s(640) == pytest.approx(0.070, rel=0.01)  # between two points
    assert found.linear_s(2048) == pytest.approx(0.220, rel=0.01)  # beyond the last
    assert found.read([1000]) == pytest.approx(1000 * 3e-8)
    assert found.prefill_attention(0, 100) == pytest.approx(5050 * 1e-8)
    assert found.sequence_s == 2e-5


def test_another_gpu_is_as_efficient():
    fast = Gpu(name="two", memory_gb=10, bandwidth_tb_s=4, usd_per_hour=1, tflops={"fp16": 800})
    slow, quick = measured_on(GPU), measured_on(fast)
    assert quick.linear_s(1) == pytest.approx(slow.linear_s(1) / 2)
    assert quick.read([1]) == pytest.approx(slow.read([1]) / 2)


def write(path: Path, rows: object) -> Path:
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_results_of_a_benchmark_are_read_by_format(tmp_path: Path):
    path = write(tmp_path / "r.json", [{"kv": "int4", "step_costs": COSTS}, {"kv": "fp16"}])
    assert read_efficiency(path, GPU, "int4") == efficiency(COSTS, GPU, source="here")
    with pytest.raises(ConfigError, match="only of int4"):
        read_efficiency(path, GPU, "fp16")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "no costs of steps"),
        (None, "no results"),
        ([{"kv": "int4", "step_costs": {"linear": []}}], "must have"),
        (
            [{"kv": "int4", "step_costs": COSTS | {"linear": [[1, 1e-6]]}}],
            "does not fit the data sheet of one",
        ),
        ([{"kv": "int4", "step_costs": COSTS | {"linear": "fast"}}], "does not fit"),
        ([{"kv": "int4", "step_costs": COSTS | {"sequence_s": -1}}], "does not fit"),
    ],
)
def test_what_is_no_measurement_is_refused(tmp_path: Path, rows: object, said: str):
    with pytest.raises(ConfigError, match=said):
        read_efficiency(write(tmp_path / "r.json", rows), GPU, "int4")
