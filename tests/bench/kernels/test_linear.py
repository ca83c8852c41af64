"""`kvq bench linear`: rows that add up, and nothing timed that is wrong."""

import json
from pathlib import Path

import pytest
import torch

from kvq import cli
from kvq.bench.kernels import measure
from kvq.bench.kernels.linear import LinearWorkload, bench_linear
from kvq.errors import KVQError
from kvq.kernels.linear.cpu import CpuLinear
from kvq.models.parts.linear import is_supported


@pytest.fixture(autouse=True)
def small_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights: no need to rotate them past the cache."""
    monkeypatch.setattr(measure, "cache_bytes", lambda _: 1 << 12)
    monkeypatch.setattr(measure, "read_bandwidth", lambda _: 20.0)


def run(*arguments: str) -> None:
    """A command that must succeed."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "linear", *arguments])
    assert not stop.value.code


def test_rows_hold_what_was_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "linear.json"
    run("--weights", "int8,int4_g64_asym,w8a8", "--rows", "1,7", "--shape", "33x64", "--shape", "5X128",
        "--backend", "cpu", "--device", "cpu", "--repeats", "3", "--json", str(path))  # fmt: skip
    result = json.loads(path.read_text())
    names = ["int8", "int4_g64_asym", "w8a8", "float32", "bfloat16"]  # kvq's, then torch's
    names += ["float32", *(["bfloat16"] if is_supported(torch.bfloat16) else [])]
    assert [(r["out_features"], r["rows"], r["weights"]) for r in result["rows"]] == [
        (outputs, rows, name) for outputs in (33, 5) for rows in (1, 7) for name in names
    ]
    for row in result["rows"]:
        assert (row["name"], row["backend"]) in {("kvq", "cpu"), ("torch", "onednn")}
        assert row["ms_p10"] <= row["ms_median"] <= row["ms_p90"]
        assert row["fraction_of_limit"] == pytest.approx(row["gb_per_s"] / result["read_gb_per_s"])
        assert row["max_relative_error"] < (
            3e-2 if row["name"] == "torch" and row["weights"] == "bfloat16" else 2e-4
        )
    assert "int4_g64_asym" in capsys.readouterr().out


def test_a_wrong_kernel_is_found_and_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    product = CpuLinear.__call__
    monkeypatch.setattr(CpuLinear, "__call__", lambda *arguments: 1.01 * product(*arguments))
    monkeypatch.setattr(measure, "Stopwatch", None)
    workload = LinearWorkload(
        out_features=8, in_features=64, rows=3, dtype=torch.float32, device=torch.device("cpu"), backend="cpu"
    )
    with pytest.raises(KVQError, match="kvq over int8 is wrong: relative error 1"):
        bench_linear(workload, ["int8"])


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (["--shape", "4096"], "--shape takes OUTPUTSxINPUTS"),
        (["--shape", "0x8"], "--shape takes OUTPUTSxINPUTS"),
        (["--rows", "0"], "--rows takes numbers"),
        (["--rows", ","], "--rows takes values"),
        (["--weights", "int5"], "unknown weight format"),
        (["--weights", "int4_g48"], "don't divide 64 inputs"),
        (["--dtype", "fp64"], "--dtype must be"),
        (["--backend", "gpu"], "unknown backend"),
    ],
)
def test_bad_options_say_what_is_allowed(
    bad: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "linear", "--shape", "8x64", "--device", "cpu", *bad])
    assert stop.value.code
    assert said in capsys.readouterr().err
