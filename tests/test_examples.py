"""What docs/research.md tells of formats and engines of one's own runs, and gives what it says."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import kvq
from kvq.formats.spec import Own
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "research.md").read_text(encoding="utf-8")
TEXT = "The cache keeps keys and values of every token that was read, so that none is computed twice. " * 2


@pytest.mark.parametrize("kv", ["fp32", "int8", "int4"])
def test_the_example_of_an_engine_answers_as_kvqs_own_and_shares_prefixes(tiny, kv):
    """More requests than seats, prompts beside single tokens, and the last find what the first computed."""
    from examples import own_engine

    known = tiny.with_kv(kv)
    prompts = [
        known.tokenizer(q)["input_ids"] for q in ("Once upon a time", *(TEXT + w for w in ("And", "But")))
    ]
    prompts.append(prompts[1])
    engine = own_engine.Engine(known, max_batch=2)
    requests = [own_engine.Request(list(ids), end=len(ids) + 12) for ids in prompts]
    engine.waiting.extend(requests)
    done, most = [], 0
    while engine.waiting or engine.running:
        done += engine.step()
        most = max(most, len(engine.running))
        engine.manager.check_integrity()
    assert sorted(map(id, done)) == sorted(map(id, requests))
    assert most == 2
    with kvq.LLM(known, num_blocks=64) as llm:
        outs = llm.generate(prompts, kvq.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert [one.ids[-12:] for one in requests] == [list(out.outputs[0].token_ids) for out in outs]
    assert [one.reused >= 32 for one in requests] == [False, False, True, True]
    assert all(usage.live == 0 for usage in engine.manager.usage())


def test_ratios_of_rollouts_are_exactly_one():
    assert "12 rollouts, 384 tokens, ratios from 1.0 to 1.0" in run("examples/importance_ratios.py")


def test_the_engine_has_as_many_lines_as_the_page_says():
    text = (ROOT / "examples/own_engine.py").read_text(encoding="utf-8")
    [engine] = re.findall(r"^class Engine:.*?(?=^def )", text, re.M | re.S)
    assert len(engine.rstrip().splitlines()) <= int(re.search(r"one of (\d+) lines", PAGE)[1])


def run(path, *options):
    """What a script prints."""
    done = subprocess.run(
        [sys.executable, path, *options], capture_output=True, text=True, timeout=HANG_S, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_pages_format_stands_in_kvqs_table(tmp_path):
    """The page's own code as a file, with its own command on less text."""
    script = tmp_path / "my_format.py"
    script.write_text(re.search(r"```python\n(.*?)```", PAGE, re.S)[1], encoding="utf-8")
    [command] = re.findall(r"^python my_format.py (perplexity .*)$", PAGE, re.M)
    shown = run(script, *command.split(), "--context", "96", "--max-windows", "1")
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if re.match(r"\S*(fp32|int)", line)}
    assert list(rows) == ["fp32", "int4", "my-int4", "int8/my-int4"]
    assert [rows[name][1] for name in ("my-int4", "int8/my-int4")] == ["4.25", "6.375"]


def test_the_examples_formats_are_measured(monkeypatch, capsys):
    monkeypatch.setattr(Own, "registered", {})
    path = str(ROOT / "examples" / "own_format.py")
    monkeypatch.setattr(
        sys,
        "argv",
        [path, "perplexity", "--kv", "my-channels/my-int4", "--context", "64", "--max-windows", "1"],
    )
    with pytest.raises(SystemExit) as end:
        runpy.run_path(path, run_name="__main__")
    assert not end.value.code
    assert "my-channels/my-int4" in capsys.readouterr().out
