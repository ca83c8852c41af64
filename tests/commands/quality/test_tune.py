"""`kvq tune`: a file that serves, a report that needs nothing else, and refusals before long work."""

import json
import re
from dataclasses import replace

import pytest

from kvq.calib import budget
from kvq.calib.budget import TunePlan
from kvq.commands.quality import tune
from tests.helpers_models import save_first_layers

FEW = ("--context", 96, "--max-windows", 2, "--verify-windows", 2, "--formats", "int8,int4")


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The embedded model's first two layers, which are searched three times as fast."""
    folder = tmp_path_factory.mktemp("short") / "model"
    save_first_layers(folder, 2)
    return folder


def test_a_recipe_its_report_and_its_plot_are_written(kvq, short, tmp_path):
    names = {name: tmp_path / f"out.{name}" for name in ("json", "html", "svg")}
    recipe = tmp_path / "kvq.json"
    status, said, _ = kvq(
        "tune", short, "--budget", "5bits", "--out", recipe, "--json", names["json"],
        "--html", names["html"], "--plot", names["svg"], *FEW,
    )  # fmt: skip
    assert status == 0
    assert f"wrote {recipe}" in said.replace("\n", "")
    result = json.loads(names["json"].read_text())
    chosen = next(row for row in result["rows"] if row["kind"] == "chosen")
    assert chosen["bits_per_element"] <= 5
    assert {row["kind"] for row in result["rows"]} == {"uniform", "tuned", "chosen"}
    assert len({(row["layer"], row["part"]) for row in result["sensitivities"]}) == 4
    assert result["text_digest"] != result["held_out_digest"]
    page = names["html"].read_text()
    assert page.count("<svg") == 2
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r'(src|href)="(https?:)?//', page)
    assert "front" in names["svg"].read_text()
    status, said, _ = kvq(
        "perplexity", "--model", short, "--kv", f"fp32,{recipe}", "--max-windows", 1, "--context", 64
    )
    assert status == 0
    status, said, _ = kvq(
        "generate", "--model", short, "--kv", recipe, "--max-tokens", 4, "The with statement"
    )
    assert status == 0


def test_another_budget_takes_the_costs_of_a_search_before(kvq, short, tmp_path):
    def run(*more):
        return kvq("tune", short, "--out", tmp_path / "r.json", *FEW, *more)

    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert run("--budget", "5bits", "--json", first)[0] == 0
    status, _, err = run("--budget", "7bits", "--costs", first, "--json", second)
    assert status == 0, err
    before, after = (json.loads(path.read_text()) for path in (first, second))
    assert before["sensitivities"] == after["sensitivities"]
    assert before["recipe"] != after["recipe"]
    cases = [
        (("--context", 64), "its context is 96, here it is 64"),
        (("--sinks", 4), "its exact is '', here it is '+sinks=4'"),
        (("--block-size", 16), "blocks of another size"),
        (("--text", __file__, "--context", 96), "its text_digest is"),
        (("--costs", tmp_path / "none.json"), "No such file"),
        (("--costs", __file__), "can't be used"),
    ]
    for more, words in cases:
        status, _, err = run("--budget", "7bits", "--costs", first, *more)
        assert (status, words in err.replace("\n", " ")) == (2, True), err
    rows = after["sensitivities"]
    for broken in ([rows[0] | {"layer": 7}], [rows[0] | {"kl": "x"}], [{"layer": 0}], [1], None):
        second.write_text(json.dumps(after | {"sensitivities": broken}))
        status, _, err = run("--costs", second)
        assert status == 2, broken
        assert f"--costs {second} can't be used" in err.replace("\n", " ")


@pytest.mark.long
def test_what_a_sequence_holds_is_in_the_table_and_a_tail_that_holds_most_is_said(kvq, short, tmp_path):
    path = tmp_path / "t.json"
    status, said, err = kvq(
        "tune",
        short,
        "--budget",
        "5bits",
        "--recent",
        60,
        "--out",
        tmp_path / "kvq.json",
        "--json",
        path,
        *FEW,
    )
    assert status == 0
    result = json.loads(path.read_text())
    chosen = next(row for row in result["rows"] if row["kind"] == "chosen")
    assert 0.5 < chosen["exact_keys"] < 1
    assert chosen["bits_held"] == pytest.approx(chosen["bits_per_element"] + 16, rel=0.01)  # 96 of 96 tokens
    share = int(1000 * chosen["exact_keys"]) / 10
    assert f"warning: with --recent 60, {share:g}% of the keys that queries see in 96 tokens" in err
    assert f"Mind: with it, {share:g}% of the keys" in result["verdict"]
    assert re.search(r"^recipe +bits +bits held +bytes/token", said, re.M)
    assert re.search(rf"^chosen.* {chosen['bits_held']:.3f}".rstrip("0"), said, re.M)


@pytest.mark.long
def test_a_limit_that_text_it_did_not_see_exceeds_ends_with_1(kvq, short, tmp_path, monkeypatch):
    monkeypatch.setattr("kvq.models.check.verdict.HARMLESS_KL", -1.0)  # any damage is a lot
    status, said, _ = kvq(
        "tune", short, "--max-kl", 0.02, "--out", tmp_path / "kvq.json", "--json", tmp_path / "r.json", *FEW
    )
    result = json.loads((tmp_path / "r.json").read_text())
    chosen = next(row for row in result["rows"] if row["kind"] == "chosen")
    assert result["search_kl"] <= 0.02
    assert status == (1 if chosen["kl_mean"] > 0.02 else 0)
    assert ("above --max-kl 0.02" in said.replace("\n", " ")) == (status == 1)
    assert "try --formats int8,int6,int5,int4,int3,int2" in said.replace("\n", " ")


def test_codes_that_are_slow_here_are_named(tiny, monkeypatch, capsys):
    monkeypatch.setattr(budget, "has_fast_kernel", lambda model, code: code.name != "int2")
    plan = TunePlan(max_kl=1.0)
    tune._say_codes(tiny.prepared, plan)
    assert "kvq: int2 has no fast kernel here" in capsys.readouterr().err
    tune._say_codes(tiny.prepared, replace(plan, codes=plan.codes[:2]))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--budget", "int4", "--max-kl", "0.1"), "two ends of one trade"),
        (("--budget", "2bits"), "the smallest formats searched take 480"),
        (("--budget", "lots"), "--budget takes bits per element (4.5bits)"),
        (("--formats", "int4,fp6"), "--formats takes int8, int6, int5, int4, int3, int2, got 'fp6'"),
        (("--recent", "512"), "--recent 512 keeps all of 512 tokens unquantized"),
        (("--context", "64", "--sinks", "60", "--recent", "8"), "a smaller --recent or --sinks"),
        (("--recent", "-1"), "recent must be 0 to 65536 tokens"),
        (("--plot", "front.bmp"), "must end in .svg, .png, .pdf"),
        (("--max-kl", "nan"), "not a finite number"),
        (("--max-kl", "0"), "x>0"),
        (("--out", "/no/such/folder/kvq.json"), "there is no folder"),
        (
            ("--out", "r.json", "--html", "r.html"),
            "two results would go into one file: r.json, r.json, r.html",
        ),
        (("--context", "1"), "this model takes 2 to"),
        (("--text", "/no/such/text.txt"), "can't read"),
    ],
)
def test_what_can_not_be_done_is_refused_with_a_reason(kvq, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    status, _, err = kvq("tune", "tiny", *arguments)
    assert status == 2
    assert says in " ".join(err.split())
    assert not list(tmp_path.iterdir())


def test_a_held_out_text_that_is_too_short_is_refused_before_the_search(kvq, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("too few words")
    status, _, err = kvq("tune", "tiny", "--held-out", text, "--out", tmp_path / "k.json")
    assert status == 2
    assert "one window needs 512" in err
    assert not (tmp_path / "k.json").exists()


def test_the_text_that_was_searched_on_is_not_measured_on(kvq, tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("some words " * 2000)
    status, _, err = kvq("tune", "tiny", "--text", text, "--held-out", text, "--out", tmp_path / "k.json")
    assert status == 2
    assert "--held-out shares" in err
    lines = "".join(f"a line of over forty characters, and its number is {i}\n" for i in range(400))
    (tmp_path / "a.txt").write_text(lines)
    (tmp_path / "b.txt").write_text(lines + "one more line, which is of more than forty characters\n")
    status, _, err = kvq(
        "tune", "tiny", "--text", tmp_path / "a.txt", "--held-out", tmp_path / "b.txt", "--out", text
    )
    assert status == 2
    assert "--held-out shares 100% of its long lines" in err
