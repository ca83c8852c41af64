"""`benchmarks.gpu.engine_steps` and the models of random weights that it runs on a GPU."""

import pytest
import torch

import kvq
from benchmarks.gpu import models
from benchmarks.gpu.case import Target
from benchmarks.gpu.engine_steps import _opened, _prefill, _watched, bench_steps
from kvq.bench.engine.load import LoadRequest
from kvq.bench.engine.server import _GraphsRefused
from kvq.engine import EngineConfig
from kvq.engine.device.graphs import DecodeGraphs, decode_graphs
from kvq.errors import EngineError
from kvq.models import Model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("gpu")
    return models.model(Target(device="cpu", folder=folder, out=folder), "small")


def test_a_random_model_is_the_one_in_its_folder(small: Model) -> None:
    ids = list(range(40))
    logits = small.logits(ids)
    assert torch.equal(logits, kvq.load(small.prepared.folder, device="cpu").logits(ids))
    assert logits.std() > 0.01
    assert small.description.startswith("qwen3")


def test_a_steps_limit_is_reading_weights_and_kv_once(small: Model) -> None:
    one, many = (bench_steps(small, "bf16", batch=n, context=64, read_gb_per_s=2.0, steps=2) for n in (1, 4))
    depth = (many["read_mb"] - one["read_mb"]) * 1e6 / 3 / small.with_kv("bf16").kv_bytes_per_token
    assert 64 < depth < 64 + 30
    for row in (one, many):
        assert row["limit_ms"] == pytest.approx(row["read_mb"] / 2)
        assert row["fraction_of_limit"] == pytest.approx(row["limit_ms"] / row["ms_median"])
        assert (row["graph"], row["graph_reason"]) == (False, "not on a GPU")
        assert row["gpu_busy_ms"] is None


def test_steps_are_not_measured_when_a_request_ends_meanwhile(small: Model) -> None:
    requests = [LoadRequest(index=i, prompt=[1, 2, 3], output_tokens=n) for i, n in enumerate((6, 60))]
    with _opened(small, "bf16", EngineConfig(num_blocks=16), requests) as server:
        _prefill(server, requests)
        with pytest.raises(EngineError, match="ended, or was preempted"):
            _watched(server, 10, 2)


def test_a_row_says_why_steps_were_not_captured() -> None:
    told = _GraphsRefused()

    def fail() -> DecodeGraphs:
        raise RuntimeError("it can't be captured")

    with told.listening():
        assert decode_graphs(torch.device("cuda"), fail) is None
    assert told.reason is not None
    assert told.reason.startswith("decode steps run without CUDA graphs: ")
