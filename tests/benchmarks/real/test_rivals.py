"""Other engines' figures are of the tokens that they should be of, and their failures are told."""

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import kvq
from benchmarks.real import rivals
from benchmarks.real.bench import Bench
from benchmarks.real.closeness import told
from benchmarks.real.lab import ROOT, Lab
from benchmarks.real.run_transformers import figures
from kvq.errors import ConfigError, EngineError
from kvq.evals import default_text
from kvq.evals.text import token_windows

TINY = ROOT / "kvq" / "models" / "tiny"
PREFILL = 20


def test_an_unquantized_cache_of_transformers_diverges_by_nothing():
    ours = kvq.load("tiny", kv="fp32")
    windows = token_windows(ours.tokenizer, default_text().text, context=101, max_windows=2)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    seen = []
    found = figures(
        model, torch.tensor(windows), DynamicCache(config=model.config), PREFILL, lambda *x: seen.append(x)
    )
    assert {(len(rows), len(rows[0])) for rows in found.values()} == {(2, 100 - PREFILL)}
    row = told(**found)
    assert abs(row["kl_mean"]) < 1e-6
    assert row["top1_agreement"] == 1
    logs = torch.log_softmax(ours.logits(windows[1]), dim=-1)
    expected = -logs[torch.arange(PREFILL, 100), torch.tensor(windows[1][PREFILL + 1 :])]
    assert found["nll"][1] == pytest.approx(expected.tolist(), abs=1e-3)
    assert seen[-1][1] == 101


def test_a_process_is_heard_while_it_runs():
    program = (
        "import json, sys; asked = json.load(sys.stdin); print('a warning', file=sys.stderr); "
        "print('3 4', file=sys.stderr); print(json.dumps([asked['x'] + 1]))"
    )
    seen = []
    found = rivals._answer([sys.executable, "-c", program], {"x": 1}, {}, lambda *x: seen.append(x))
    assert (found, seen) == ([2], [(3, 4)])


def test_a_process_that_fails_says_why():
    program = "import sys; sys.stdin.read(); raise ValueError('no such cache')"
    with pytest.raises(EngineError, match=r"ended with 1: .*no such cache"):
        rivals._answer([sys.executable, "-c", program], {}, {}, lambda *_: None)


def test_packages_that_are_not_there_are_asked_for(tmp_path):
    data = tmp_path / "wikitext-2"
    data.mkdir()
    (data / "test.txt").write_text(default_text().text, encoding="utf-8")
    bench = Bench(Lab(folder=tmp_path, data=tmp_path), "tiny")
    for name in (rivals.TRANSFORMERS[0], "llama.cpp-q8_0"):
        with pytest.raises(ConfigError, match=r"make real RIVALS=1|install Node\.js"):
            rivals.measure(bench, name, {"context": 64, "tokens": 64}, lambda *_: None)
    found = rivals.measure(bench, "kivi-k2v2", {"context": 64, "tokens": 64}, lambda *_: None)
    assert found["kl_mean"] > 0
    assert "simulates" in found["logits"]
