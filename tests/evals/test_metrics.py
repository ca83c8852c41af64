"""Gates on lm-eval's metrics concern the rows that they name, and changes are from the first format."""

import pytest

from kvq.evals.report.gates import changes, failures, metric_figures, metric_rows, parse_gate

FORMATS = {"fp32": False, "int4": True}


def row(kv, task, metric, value, kind="none"):
    return {"kv": kv, "task": task, "metric": metric, "filter": kind, "value": value}


ROWS = [
    row("fp32", "a", "acc", 0.5),
    row("fp32", "b", "acc", 0.75),
    row("fp32", "b", "exact", 0.25, "strict-match"),
    row("fp32", "b", "exact", 0.5, "flexible-extract"),
    row("int4", "a", "acc", 0.25),
    row("int4", "b", "acc", 1.0),
    row("int4", "b", "exact", 0.125, "strict-match"),
    row("int4", "b", "exact", None, "flexible-extract"),
]


def test_changes_are_from_the_first_format():
    assert changes(ROWS) == [0, 0, 0, 0, -0.25, 0.25, -0.125, None]
    assert metric_figures(["acc"]) == ["acc", "acc_change"]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("lm_eval.acc>=0.9", ["task a, metric acc"]),
        ("lm_eval:b.acc>=0.9", []),
        ("fp32:lm_eval.acc>=0.6", ["task a, metric acc"]),
        ("acc_change>=-1%", ["task a, metric acc"]),
        ("lm_eval:b.exact>=0.1", ["task b, metric exact, filter flexible-extract"]),
        ("lm_eval:b.exact,strict-match>=0.1", []),
        ("lm_eval:b.exact_change,strict-match>=0", ["task b, metric exact, filter strict-match"]),
        ("lm_eval:b.exact,no-such-filter>=0", ["not measured"]),
        ("lm_eval:a.exact>=0", ["not measured"]),
    ],
)
def test_gates_concern_the_rows_that_they_name(text, where):
    gate = parse_gate(text)
    assert [one["where"] for one in failures(gate, metric_rows(ROWS, gate), FORMATS)] == where
