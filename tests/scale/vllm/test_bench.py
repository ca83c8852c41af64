"""`kvq bench vllm` as it is called, under loads of seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvq.bench.vllm.engine import VllmServer
from kvq.errors import EngineError
from tests.scale.vllm.kit import TINY


def test_what_vllm_refuses_is_said_with_its_reason() -> None:
    limits = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24, "max_model_len": 128, "max_num_seqs": 2}
    with pytest.raises(EngineError, match=r"vLLM refuses .* static scales"):
        VllmServer("fp8_per_head", TINY, limits)


def test_a_run_checks_measures_and_writes_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    loads = ["--burst", "2x32x4", "--deep", "2x160x2", "--repeats", "2"]
    command = [sys.executable, "-m", "kvq", "bench", "vllm", "--kv", "int8,int4", *loads, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = result["rows"]
    assert [row["kv"] for row in rows] == 2 * ["float32", "int8", "int4"]
    assert "0.32" in result["vllm"]
    for row in rows:
        assert row["samples"] == 2
        assert row["output_tokens_per_s"] > 0
        assert min(row["attention_ms"], row["write_ms"], row["other_ms"]) > 0
    blocks = [row["blocks"] for row in rows[:3]]
    assert blocks[0] < blocks[1] < blocks[2]  # of the same memory
