"""Two results are compared row by row, and what makes that doubtful is said."""

import json

import pytest
from click.testing import CliRunner

from kvq.commands.quality.compare import command
from kvq.errors import ConfigError
from kvq.evals.report.compare import compare, read_result

ENVELOPE = {
    "kvq_version": "1", "commit": "c", "date": "d", "device": "cpu", "versions": {}, "command": "kvq eval",
    "model": "m", "model_digest": "1" * 64, "text": "t", "text_digest": "2" * 64, "context": 64,
}  # fmt: skip
SIZES = {"bits_per_element": 8.0, "kv_bytes_per_token": 10.0, "compression": 2.0}


def row(kv, kl, interval=None, **more):
    return {"kv": kv, **SIZES, "kl_mean": kl, "intervals": {"kl_mean": interval}, **more}


def result(*rows, **more):
    return {**ENVELOPE, "rows": list(rows), **more}


def test_rows_are_matched_by_format_and_the_rest_is_listed():
    found = compare(
        result(row("fp32", 0.0), row("int8", 0.1), row("int4", 0.5)),
        result(row("fp32", 0.0), row("fp8", 0.2), row("int8", 0.3, [0.2, 0.4])),
    )
    (one,) = [d for d in found["rows"] if d["figure"] == "kl_mean" and d["kv"] == "int8"]
    assert (one["a"], one["b"], one["b_interval"]) == (0.1, 0.3, [0.2, 0.4])
    assert one["difference"] == pytest.approx(0.2)
    assert (found["only_in_a"], found["only_in_b"], found["warnings"]) == (["int4"], ["fp8"], [])


def test_the_same_format_with_a_shorter_window_is_another_row():
    found = compare(result(row("fp32", 0.0), row("fp32", 0.7, attention_window=64)), result(row("fp32", 0.0)))
    assert found["only_in_a"] == ["fp32, attention_window 64"]


def test_rows_of_further_tasks_are_matched_by_what_tells_them_apart():
    a, b = (
        result(
            row("int8", 0.1),
            tasks=[{"key": "rows"}, {"key": "needle"}],
            needle=[{"kv": "int8", "length": n, "depth": 0.5, "retrieved": hit} for n, hit in grid],
        )
        for grid in ([(64, 1.0), (128, 0.5)], [(128, 0.75), (256, 0.5)])
    )
    found = compare(a, b)
    (one,) = [d for d in found["rows"] if d["section"] == "needle"]
    assert (one["where"], one["figure"], one["difference"]) == ("length 128, depth 0.5", "retrieved", 0.25)
    assert found["only_in_a"] == ["needle of int8, length 64, depth 0.5"]
    without = result(row("int8", 0.1), tasks=[{"key": "rows"}])
    assert compare(a, without)["only_in_a"] == ["the task needle"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"text_digest": "3" * 64}, "the texts differ: t (222222222222) against t (333333333333)"),
        ({"model_digest": "3" * 64}, "the models differ"),
        ({"context": 128}, "differ in tokens: 64 against 128"),
        ({"device": "gpu"}, "the devices differ"),
    ],
)
def test_what_makes_figures_incomparable_is_warned_of(change, says):
    (warning,) = compare(result(row("int8", 0.1)), result(row("int8", 0.1), **change))["warnings"]
    assert says in warning


def test_other_kinds_and_broken_files_are_refused(tmp_path):
    def read(content):
        path = tmp_path / "r.json"
        path.write_text(content)
        return read_result(path)

    good = result(row("int8", 0.1))
    assert read(json.dumps(good)) == good
    with pytest.raises(ConfigError, match="one result is of kvq perplexity, the other of kvq eval"):
        compare(good, result(row("int8", 0.1), tasks=[{"key": "rows"}]))
    with pytest.raises(ConfigError, match="can't read"):
        read_result(tmp_path / "none.json")
    for content in ("", "[]", "{", '{"rows": 3}', "[" * 100_000):
        with pytest.raises(ConfigError, match=r"not JSON|no result of kvq"):
            read(content)
    for bad in (
        {"command": "kvq bench blocks", "rows": [{"operation": "fork"}]},
        result(),
        result({**row("int8", 0.1), "kv": ["int8"]}),
        result({**row("int8", 0.1), "attention_window": [1]}),
        result({**row("int8", 0.1), "intervals": {"kl_mean": [1]}}),
        result(row("int8", 0.1), tasks=3),
        result(row("int8", 0.1), tasks=[{"key": "needle"}]),
        result(row("int8", 0.1), tasks=[{"key": "needle"}], needle=[3]),
    ):
        with pytest.raises(ConfigError, match=r"no result of kvq|is damaged"):
            read(json.dumps(bad))


def test_a_format_without_a_name_is_told_as_it_is():
    found = compare(result(row(7, 0.1)), result(row("int8", 0.1)))
    assert (found["only_in_a"], found["only_in_b"]) == (["7"], ["int8"])


def test_rows_that_no_task_names_are_not_compared():
    """Nobody checked them when the result was read."""
    needles = [{"kv": "int8", "length": 64, "depth": 0.5, "retrieved": 0.5}]
    a = result(
        row("int8", 0.1), tasks=[{"key": "rows"}, {"key": "needle"}], needle=needles, needle_summary=[]
    )
    b = result(row("int8", 0.1), tasks=[{"key": "rows"}], needle=[None, "a"])
    assert compare(a, b)["only_in_a"] == ["the task needle"]
    assert compare(b, a)["only_in_b"] == ["the task needle"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": None}, "model"),
        ({"text": 3}, "text"),
        ({"device": "x" * 20_000}, "device"),
        ({"context": "64"}, "context"),
        ({"commit": ["c"]}, "commit"),
        ({"seed": "1"}, "seed"),
        ({"complete": "no"}, "complete"),
        ({"rows": [{**row("int8", 0.1), "tokens": "\x1b[2J"}]}, r"rows\[0\]\.tokens"),
        ({"rows": [{**row("int8", "0.1")}]}, r"rows\[0\]\.kl_mean"),
        ({"rows": [{**row("int8", 0.1), "compression": True}]}, r"rows\[0\]\.compression"),
        ({"rows": [row("int8", 0.1, [0.1, 1e308])]}, r"rows\[0\]\.intervals\.kl_mean"),
        ({"tasks": [{"key": 3}]}, r"tasks\[0\]"),
        ({"tasks": [{"key": "model"}]}, "model"),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path, change, field):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**result(row("int8", 0.1)), **change}))
    with pytest.raises(ConfigError, match=f"is damaged: {field} must be"):
        read_result(path)


def test_what_is_shown_of_a_result_cant_steer_the_terminal(tmp_path):
    paths = [tmp_path / f"{name}.json" for name in "ab"]
    for path, name in zip(paths, ("m\x1b[2J[red]\u202e", "n\n\r"), strict=True):
        content = result(row(name, 0.1, tokens=5), model=name, date="\x9b")
        del content["commit"]
        path.write_text(json.dumps(content))
    done = CliRunner().invoke(command, list(map(str, [*paths, "--json", tmp_path / "c.json"])))
    assert done.exit_code == 0, done.exception
    assert r"m\x1b[2J[red]\u202e" in done.stdout
    assert not set("\x1b\u202e\r\x9b") & set(done.output)
