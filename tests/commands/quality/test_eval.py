"""`kvq eval` and `kvq compare` as people run them."""

import json
import re

import pytest

from tests.helpers_cli import remarks

SHORT = ("--context", 80, "--max-windows", 12, "--resamples", 200)
PROMISED = {
    "kv", "bits_per_element", "kv_bytes_per_token", "compression", "tokens", "perplexity",
    "perplexity_change", "kl_mean", "kl_median", "kl_p99", "kl_p999", "top1_agreement",
    "top5_agreement", "intervals", "by_depth", "by_difficulty", "seconds",
}  # fmt: skip
TASKS = "perplexity,kl,generation,attention"


def test_everything_in_one_run(kvq, tmp_path):
    page = tmp_path / "e.html"
    few = ("--prompts", 8, "--prompt-tokens", 90, "--new-tokens", 6, "--attention-windows", 2)
    status, out, err = kvq(
        "eval", "tiny", "--kv", "fp32,int8,int4", "--tasks", TASKS, *SHORT, *few, "--html", page
    )
    assert (status, remarks(err)) == (0, [])
    for task in ("perplexity,kl", "generation", "attention"):
        assert re.search(
            rf"^{task}: [\d.]+ s, peak memory [\d.,]+ [MG]iB \(\+[\d.,]+ ([KMG]i)?B\)$", out, re.M
        )
    verdict = r"(harmless|warning|broken): KL [\d.]+, perplexity [+-]"
    assert re.search(rf"^int4 +4\.625 +[\d.]+ +888 +3\.46x .* {verdict}", out, re.M)
    text = page.with_suffix(".json").read_text()
    assert not re.search(r"\b(NaN|Infinity)\b", text)
    result = json.loads(text)
    assert [row["kv"] for row in result["rows"]] == ["fp32", "int8", "int4"]
    assert all(set(row) >= PROMISED for row in result["rows"])
    assert [row["kv"] for row in result["generation"]] == ["fp32", "int8", "int4"]
    assert {row["layer"] for row in result["attention"]} == set(range(6))
    assert [task["names"] for task in result["tasks"]] == [
        ["perplexity", "kl"],
        ["generation"],
        ["attention"],
    ]
    assert all(task["seconds"] > 0 and task["peak_bytes"] > 1 << 20 for task in result["tasks"])
    html = page.read_text()
    assert html.count("<svg") == 4
    assert "prefers-color-scheme: dark" in html
    assert not re.search(
        r"""(src|href)\s*=\s*["']?(https?:)?//|<(link|script|img|iframe)\b|@import|url\(http""", html
    )


def test_methods_of_others_stand_beside(kvq, tmp_path):
    path = tmp_path / "e.json"
    several = ("kl,needle", "--needle-lengths", 160, "--needle-trials", 1, "--needle-depths", 0.5)
    status, out, _ = kvq(
        *("eval", "--kv", "fp32,int4", "--simulate", "kivi-k4v4,kvarn-k2v2-g16+recent=8", "--tasks"),
        *(*several, *SHORT, "--json", path),
    )
    assert status == 0
    rows = {row["kv"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["fp32", "int4", "kivi-k4v4", "kvarn-k2v2-g16+recent=8"]
    assert rows["kivi-k4v4"]["bits_per_element"] == 5
    assert rows["kvarn-k2v2-g16+recent=8"]["kl_mean"] > 0
    assert re.search(r"^kivi-k4v4 +5 +[\d.]+ +960 ", out, re.M)


def test_gates_decide_the_exit_status_and_say_why(kvq, tmp_path):
    path = tmp_path / "e.json"
    gates = (
        "--gate",
        "int8:kl_mean<9mnats",
        "--gate",
        "kl_mean<0.0005",
        "--gate",
        "int8:top5_agreement>=90%",
    )
    status, out, _ = kvq("eval", "--kv", "fp32,int8,int4", *SHORT, *gates, "--json", path)
    assert status == 1
    assert re.search(r"^gate kl_mean<0\.0005: FAILED by int4: 0\.0\d+, the limit is 0\.0005$", out, re.M)
    assert out.count("passed") == 2
    assert [gate["passed"] for gate in json.loads(path.read_text())["gates"]] == [True, False, True]
    assert kvq("eval", "--kv", "fp32,int8", *SHORT, *gates[:2])[0] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gate", "kl_mean=1"), "--gate 'kl_mean=1' is not"),
        (("--gate", "kl_meen<1"), "did you mean 'kl_mean'"),
        (("--gate", "generation.identical>0.5"), "add generation to --tasks"),
        (("--gate", "int9:kl_mean<1"), "'int9' is not measured"),
        (("--tasks", "perplexity,generatoin"), "did you mean 'generation'"),
        (("--tasks", "kl:x"), "takes nothing after a colon"),
        (("--tasks", ","), "no task was named"),
        (("--kv", "fp32,int9"), "did you mean 'int8'"),
        (("--kv", "int8,int8"), "names a format twice"),
        (("--text", "/nowhere/at/all"), "can't read"),
        (("--json", "/nowhere/at/all.json"), "there is no folder"),
        (("--context", "5000"), "beyond this model's context"),
        (("--tasks", "kl,generation", "--prompt-tokens", 4096), "beyond this model's context"),
        (("--simulate", "kivi-k1v2"), "is no method that can be simulated; those are kivi-kKvV"),
        (("--cache", "dense", "--kv", "fp32", "--simulate", "kivi-k2v2"), "leave out --cache dense"),
        (("--tasks", "kl,attention", "--simulate", "kivi-k2v2"), "--simulate is not for attention"),
        (("--tasks", "generation", "--instrument"), "--instrument checks perplexity"),
        (("--model", "tiny-draft"), "two models were named"),
        (("--html", "x.json", "--json", "x.json"), "into one file: x.json, x.json"),
    ],
)
def test_what_can_not_be_done_is_refused_before_any_work(kvq, arguments, says):
    status, out, err = kvq("eval", "tiny", *arguments)
    assert status == 2
    assert says in err
    assert "peak memory" not in out


def test_the_model_may_be_named_by_either_spelling_and_rows_without_perplexity_hold_sizes(kvq, tmp_path):
    path = tmp_path / "e.json"
    options = ("--kv", "int8", "--tasks", "attention", *SHORT, "--json", path)
    assert kvq("eval", "--model", "tiny", *options)[0] == 0
    result = json.loads(path.read_text())
    assert [row["kv"] for row in result["rows"]] == ["fp32", "int8"]
    sizes = {"bits_per_element", "bits_held", "kv_bytes_per_token", "compression"}
    assert set(result["rows"][0]) == {"kv", *sizes}


def test_an_instrument_that_can_not_see_fails_and_its_rows_are_not_the_users(kvq, tmp_path):
    path = tmp_path / "e.json"
    status, out, _ = kvq("eval", "--kv", "fp32,int8", *SHORT, "--instrument", "--json", path)
    assert status == 1  # windows of 32 tokens lose nothing at 64
    assert "can NOT show damage" in out
    result = json.loads(path.read_text())
    assert [row["kv"] for row in result["rows"]] == ["fp32", "int8"]
    assert result["instrument"]["passed"] is False


def test_recipes_from_files_are_told_apart_by_their_paths(kvq, tiny, tmp_path):
    for name in ("a.json", "b.json"):
        tiny.with_kv("int8").recipe.save(tmp_path / name)
    path, kv = tmp_path / "e.json", f"fp32,{tmp_path}/a.json,{tmp_path}/b.json"
    gate = ("--gate", f"{tmp_path}/b.json:kl_mean<1")
    assert kvq("eval", "--kv", kv, *SHORT, *gate, "--json", path)[0] == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["kv"] for row in rows] == kv.split(",")
    assert rows[1]["kl_mean"] == rows[2]["kl_mean"]


def test_compare_shows_differences_and_warns_loudly(kvq, tmp_path):
    a, b, c = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    assert kvq("perplexity", "--kv", "fp32,int8,int4", *SHORT[:4], "--json", a)[0] == 0
    text = tmp_path / "other.txt"
    text.write_text("Other words than those, again and again. " * 200)
    assert kvq("perplexity", "--kv", "fp32,int8", *SHORT[:4], "--text", text, "--json", b)[0] == 0
    status, out, err = kvq("compare", a, b, "--json", c)
    assert status == 0
    assert "kvq: warning: the texts differ" in err
    assert re.search(r"^int8 +\d[\d.]+, \d[\d.]+ \([+-]", out, re.M)
    assert "only in A: int4" in out
    found = json.loads(c.read_text())
    assert found["only_in_a"] == ["int4"]
    assert found["a"]["text_digest"] != found["b"]["text_digest"]
    assert {"kv", "figure", "a", "b", "difference"} <= set(found["rows"][0])
    assert kvq("compare", a, a)[2] == ""
    assert kvq("compare", a, text)[0] == 2
