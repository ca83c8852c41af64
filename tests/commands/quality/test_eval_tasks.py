"""`kvq eval` with needles and lm-eval's tasks: tables, gates, pages and comparisons."""

import json
import re
import sys

import pytest

from tests.helpers_cli import remarks

NEEDLE = ("--tasks", "needle", "--needle-lengths", "80,128", "--needle-depths", "0,1", "--needle-trials", 2)
TASK = """
task: mini
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The path of an lm-eval task over a local file."""
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("task")
    patch = pytest.MonkeyPatch()
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "cache"))
    data = folder / "data.jsonl"
    docs = [
        {"question": "Calling the" * (1 + i % 3), "choices": [" object", " z", " a"], "answer": i % 3}
        for i in range(9)
    ]
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    path = folder / "mini.yaml"
    path.write_text(TASK.replace("DATA", str(data)))
    yield path
    patch.undo()


@pytest.fixture(scope="module")
def both(task, tmp_path_factory):
    """What a run of both tasks leaves: exit status, output, errors, JSON and page."""
    import contextlib
    import io

    from kvq.cli import main

    page = tmp_path_factory.mktemp("both") / "e.html"
    patch = pytest.MonkeyPatch()
    patch.setattr("kvq.evals.needle.needle._answer", answer_at_the_end)
    arguments = [
        "eval", "tiny", "--kv", "fp32,int4", *NEEDLE, "--tasks", f"needle,lm_eval:{task}",
        "--limit", 6, "--num-fewshot", 1, "--kv-memory", "64MiB", "--html", page,
        "--gate", "needle.retrieved<=1", "--gate", "needle.retrieved>=0.95", "--gate", "lm_eval:mini.acc>1",
        "--gate", "fp32:lm_eval:mini.acc,none>=0", "--gate", "lm_eval.acc_norm_change>=-100%",
    ]  # fmt: skip
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(map(str, arguments)))
            status = 0
        except SystemExit as ended:
            status = ended.code or 0
    patch.undo()
    return status, out.getvalue(), err.getvalue(), page


def answer_at_the_end(session, prompt, chunk):
    """Unquantized KV finds all; 4 bits find what stands at the end."""
    found = session.cache.layout.recipe.name == "fp32" or prompt.needle_at > 20
    return prompt.answer if found else [token + 1 for token in prompt.answer]


def test_a_model_that_finds_nothing_voids_the_test_and_its_gates(kvq, monkeypatch, tmp_path):
    monkeypatch.setattr("kvq.evals.needle.needle.VOID_AFTER", 5)
    path = tmp_path / "e.json"
    gate = ("--gate", "needle.retrieved>=0", "--json", path)
    status, out, _ = kvq("eval", "--kv", "fp32,int8", *NEEDLE, *gate)
    assert status == 1
    assert "needle is VOID: fp32 found nothing in 5 prompts" in out
    assert "gate needle.retrieved>=0: FAILED by every quantized format: needle is void" in out
    result = json.loads(path.read_text())
    assert [(row["kv"], row["trials"]) for row in result["needle_summary"]] == [("fp32", 5)]
    assert list(result["void"]) == ["needle"]


def test_tables_and_what_each_task_took(both, task):
    _, out, err, _ = both
    assert remarks(err) == []
    for name in ("needle", f"lm_eval:{task}"):
        assert re.search(rf"^{re.escape(name)}: [\d.]+ s, peak memory [\d.]+ [MG]iB", out, re.M)
    assert re.search(r"^int4 +[\d.]+% +[\d.]+% \.\. [\d.]+% +[\d.]+% +8 ", out, re.M)
    assert re.search(r"^int4 +128 +\d+% +\d+%$", out, re.M)
    assert re.search(r"^mini +acc ↑ +none +6 +0\.\d+ ± 0\.\d+ +0\.\d+ ± 0\.\d+ \([+-]0\.\d+\)$", out, re.M)


def test_json_holds_cells_summaries_and_metrics(both):
    result = json.loads(both[3].with_suffix(".json").read_text())
    cells = [(row["kv"], row["length"], row["depth"]) for row in result["needle"]]
    assert cells == [(kv, n, d) for kv in ("fp32", "int4") for n in (80, 128) for d in (0, 1)]
    assert [(row["kv"], row["trials"]) for row in result["needle_summary"]] == [("fp32", 8), ("int4", 8)]
    metrics = [(row["kv"], row["task"], row["metric"], row["samples"]) for row in result["lm_eval"]]
    assert metrics == [(kv, "mini", m, 6) for kv in ("fp32", "int4") for m in ("acc", "acc_norm")]
    assert [row["kv"] for row in result["rows"]] == ["fp32", "int4"]
    assert [task["key"] for task in result["tasks"]] == ["needle", "lm_eval"]


def test_gates_are_about_whole_grids_and_single_metrics(both):
    status, out, _, page = both
    assert status == 1
    gates = json.loads(page.with_suffix(".json").read_text())["gates"]
    assert [gate["passed"] for gate in gates] == [True, False, False, True, True]
    assert len(gates[1]["failures"]) == 1  # not one a cell
    assert re.search(r"^gate lm_eval:mini\.acc>1: FAILED by int4 task mini, metric acc: 0\.\d+, ", out, re.M)


def test_gates_that_hold_exit_with_0(kvq, monkeypatch):
    monkeypatch.setattr("kvq.evals.needle.needle._answer", answer_at_the_end)
    assert kvq("eval", "--kv", "int8", *NEEDLE, "--gate", "needle.retrieved>=0")[0] == 0


def test_the_page_needs_no_other_file(both):
    html = both[3].read_text()
    assert html.count("<svg") == 1
    assert "Retrieved, by length and depth" in html
    assert "mini" in html
    assert "prefers-color-scheme: dark" in html
    assert not re.search(
        r"""(src|href)\s*=\s*["']?(https?:)?//|<(link|script|img|iframe)\b|@import|url\(http""", html
    )


def test_two_results_are_compared_cell_by_cell(kvq, both, tmp_path):
    path = both[3].with_suffix(".json")
    changed = json.loads(path.read_text())
    changed["needle"][4]["retrieved"] += 0.5
    changed["lm_eval"][2]["value"] += 5
    del changed["needle"][7]
    changed["needle_plan"]["needle"] = "tokens"
    other = tmp_path / "b.json"
    other.write_text(json.dumps(changed))
    status, out, err = kvq("compare", path, other)
    assert status == 0
    assert "kvq: warning: the needles were asked for differently" in err
    assert err.count("warning") == 1
    assert re.search(r"^int4, length 80, depth 0\.0 +[\d.]+, [\d.]+ \(\+0\.5\)", out, re.M)
    assert re.search(r"^int4, task mini, metric acc +[\d.]+, [\d.]+ \(\+5\) !$", out, re.M)
    assert "needle_summary: A, B (B - A)" in out
    assert "only in A: needle of int4, length 128, depth 1.0" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--needle-lengths", "5000"), "this model takes 1 to 4096"),
        (("--needle-lengths", "80,x"), "is no number of tokens"),
        (("--needle-depths", "0,1.5"), "1.5 is not in the range"),
        (("--needle", "no fields"), "{key} and then {value}"),
        (("--needle-trials", "0"), "0 is not in the range"),
        (("--gate", "needle.retreived>0.5"), "did you mean 'retrieved'"),
        (("--gate", "needle.retrieved,none>0.5"), "has no filters"),
        (("--gate", "lm_eval.acc>0.5"), "add lm_eval to --tasks"),
        (("--tasks", "lm_eval"), "needs an argument, such as lm_eval:NAME"),
    ],
)
def test_what_can_not_be_asked_is_refused_before_any_work(kvq, arguments, says):
    status, out, err = kvq("eval", "tiny", *NEEDLE, *arguments)
    assert status == 2
    assert says in err
    assert "peak memory" not in out


def test_what_can_not_be_asked_of_lm_eval_is_refused_before_any_work(kvq, task, monkeypatch):
    import lm_eval.tasks

    manager = lm_eval.tasks.TaskManager  # listing lm-eval's own tasks takes seconds
    monkeypatch.setattr(
        lm_eval.tasks, "TaskManager", lambda **options: manager(**options | {"include_defaults": False})
    )
    for arguments, says in (
        (("--tasks", "needle,lm_eval:nowhere.yaml"), "there is no task file nowhere.yaml"),
        (("--tasks", "needle,lm_eval:minni", "--include-path", task.parent), "did you mean 'mini'"),
        (("--tasks", f"lm_eval:{task}", "--gate", "lm_eval:mini.accc>0.5"), "did you mean 'acc'"),
        (("--tasks", f"lm_eval:{task}", "--gate", "lm_eval:mimi.acc>0.5"), "did you mean 'lm_eval:mini'"),
        (("--tasks", f"lm_eval:{task}", "--kv-memory", "lots"), "--kv-memory"),
    ):
        status, out, err = kvq("eval", "tiny", *NEEDLE, *arguments)
        assert (status, "peak memory" in out) == (2, False)
        assert says in err


def test_without_lm_eval_the_error_says_what_to_install(kvq, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("kvq.evals.lm_eval.model", "kvq.evals.lm_eval.tasks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    status, out, err = kvq("eval", "tiny", "--tasks", "perplexity,lm_eval:hellaswag")
    assert (status, out) == (2, "")
    assert "pip install '.[eval]'" in err


def test_texts_may_be_rows_of_a_named_field(kvq, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"body": f"Row {i} of many. " * 9}) + "\n" for i in range(20)))
    short = ("--context", 80, "--max-windows", 2, "--kv", "int8")
    for command in ("eval", "perplexity"):
        assert kvq(command, *short, "--text", path, "--text-field", "body")[0] == 0
        status, _, err = kvq(command, *short, "--text", path)
        assert status == 2
        assert "it has body: name one with --text-field" in err
