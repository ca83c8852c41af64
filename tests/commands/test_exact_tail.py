"""Commands say where an exact tail holds most of what they measure, and refuse where it holds all."""

import json

import pytest

from kvq.evals.report.sections import MOST, exactness_warning

SHORT = ("--context", 128, "--max-windows", 2)


@pytest.mark.parametrize("command", ["perplexity", "eval"])
def test_what_is_mostly_exact_is_said_before_and_after_and_is_in_the_rows(kvq, command, tmp_path):
    path = tmp_path / "e.json"
    more = ("--gate", "kl_mean<1", "--tasks", "kl,attention") if command == "eval" else ()
    kv = "fp32,int3+recent=80,int3+recent=8"
    status, out, err = kvq(command, "--kv", kv, *SHORT, *more, "--json", path)
    rows = {row["kv"]: row["exact_keys"] for row in json.loads(path.read_text())["rows"]}
    assert status == 0
    assert rows["fp32"] == 0
    assert rows["int3+recent=8"] < MOST < rows["int3+recent=80"] < 1
    words = exactness_warning("int3+recent=80", rows["int3+recent=80"], 128)
    assert err.count(f"kvq: warning: {words}; give a longer --context") == 1
    assert out.count(f"caution: {words}") == 1
    assert "with int3+recent=8," not in out + err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("perplexity", "--kv", "fp32,int3+recent=128"), "int3+recent=128 keeps all of 128 tokens"),
        (("eval", "--kv", "fp32,int3+recent=128", "--gate", "kl_mean<1"), "give a longer --context"),
        (("eval", "--kv", "fp32,int3+recent=128", "--tasks", "attention"), "give a longer --context"),
        (("eval", "--kv", "fp32,int3+recent=200", "--tasks", "generation"), "give more --prompt-tokens"),
        (
            ("eval", "--kv", "int3+recent=512", "--tasks", "needle", "--needle-lengths", "160,512"),
            "give longer --needle-lengths",
        ),
        (
            ("eval", "--kv", "fp32,int4", "--simulate", "kivi-k2v2+recent=128"),
            "kivi-k2v2+recent=128 keeps all",
        ),
    ],
)
def test_what_would_be_measured_of_nothing_quantized_is_refused_before_any_work(kvq, arguments, says):
    status, out, err = kvq(*arguments, *SHORT)
    assert (status, out) == (2, "")
    assert says in err


def test_gates_can_be_on_the_share(kvq):
    gate = ("--gate", "exact_keys<=50%")
    status, out, _ = kvq("eval", "--kv", "fp32,int3+recent=80,int3", "--tasks", "kl", *SHORT, *gate)
    assert status == 1
    assert "FAILED by int3+recent=80: 93.7008%, the limit is 50%" in out
