"""Gates read what people write, refuse the rest with a hint, and never pass what is missing."""

import math
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.errors import ConfigError
from kvq.evals.report.gates import check_gate, failures, parse_gate

FIGURES = {"kl": ["kl_mean", "perplexity_change", "kl_mean_high"], "needle": ["retrieved"]}
FORMATS = {"fp32": False, "int8": True, "kvq.json": True}


def check(text):
    return check_gate(
        parse_gate(text),
        figures=FIGURES,
        all_tasks=["kl", "needle", "generation", "lm_eval"],
        formats=FORMATS,
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("kl_mean<0.01", (None, None, "kl_mean", "<", 0.01)),
        ("perplexity_change<=1%", (None, None, "perplexity_change", "<=", 0.01)),
        ("int4:top1_agreement>0.9", ("int4", None, "top1_agreement", ">", 0.9)),
        ("needle.retrieved>=0.95", (None, "needle", "retrieved", ">=", 0.95)),
        (" int8/int4 : kl.kl_p999 < 1e-2 ", ("int8/int4", "kl", "kl_p999", "<", 0.01)),
        ("int3+sinks=4+recent=32:kl_mean<1", ("int3+sinks=4+recent=32", None, "kl_mean", "<", 1)),
        ("int8/int4_mean+recent=8:kl.kl_mean<1", ("int8/int4_mean+recent=8", "kl", "kl_mean", "<", 1)),
        ("int4:bits_held<=4.75bits", ("int4", None, "bits_held", "<=", 4.75)),
        ("lm_eval:mini.acc>=0.6", (None, "lm_eval:mini", "acc", ">=", 0.6)),
        ("int4:lm_eval:mmlu::law.acc_change>-1%", ("int4", "lm_eval:mmlu::law", "acc_change", ">", -0.01)),
        ("lm_eval.exact_match,strict-match>0.5", (None, "lm_eval", "exact_match", ">", 0.5)),
        ("out/kvq.json:kl_mean>-.5", ("out/kvq.json", None, "kl_mean", ">", -0.5)),
    ],
)
def test_gates_are_read(text, parts):
    gate = parse_gate(text)
    assert (gate.kv, gate.task, gate.figure, gate.operator, gate.limit) == parts


@pytest.mark.parametrize(
    "text",
    ["", "kl_mean", "kl_mean<", "<0.01", "kl_mean=0.01", "kl_mean==1", "kl_mean<nan", "kl_mean<inf",
     "kl_mean<1%%", "__import__('os')<1", "kl_mean<0.01<0.02", "a.b.c<1", "kl mean<1",
     "kl_mean<1e999", "1<kl_mean"],
)  # fmt: skip
def test_what_is_no_gate_is_refused(text):
    with pytest.raises(ConfigError, match="--gate"):
        parse_gate(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("top1_agreement>=90", "is a share, 0 to 1 or 0% to 100%; did you mean top1_agreement>=90%?"),
        ("retrieved>=120%", "is a share"),
        ("identical_low>-0.5", "is a share"),
        ("int4:perplexity_change<=1", "write int4:perplexity_change<=1% or int4:perplexity_change<=100%"),
        ("perplexity_change_high<2.5", "a change of 250%"),
        ("perplexity<200%", "perplexity is a plain number, got '%'"),
        ("same_tokens_mean>50%", "same_tokens_mean is a plain number"),
        ("kl_mean<1%", "is given in nats, mnats, bits or plain, got '%'"),
        ("compression>3%", "is given in x or plain"),
    ],
)
def test_limits_in_mistaken_units_are_refused(text, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse_gate(text)


@given(st.text(string.printable, max_size=40))
def test_any_text_is_a_gate_or_an_error(text):
    try:
        gate = parse_gate(text)
    except ConfigError:
        return
    assert math.isfinite(gate.limit)
    assert gate.figure.isidentifier()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kl_meen<1", "did you mean 'kl_mean'.*perplexity_change"),
        ("generation.identical>0.5", "isn't run; add generation to --tasks"),
        ("neddle.retrieved>0.5", "did you mean 'needle'"),
        ("needle.kl_mean<1", "measures 'kl_mean'; there are retrieved"),
        ("needle.retrieved,none>0.5", "retrieved has no filters"),
        ("lm_eval:mini.acc>0.5", "isn't run; add lm_eval:mini to --tasks"),
        ("int9:kl_mean<1", "'int9' is not measured; did you mean 'int8'"),
    ],
)
def test_what_is_not_measured_is_refused_before_any_work(text, says):
    with pytest.raises(ConfigError, match=says):
        check(text)


def test_a_gate_finds_its_task_and_needs_a_quantized_format_or_a_name():
    assert check("kl_mean<1") == "kl"
    assert check("retrieved>0.5") == check("needle.retrieved>0.5") == "needle"
    with pytest.raises(ConfigError, match="name the format: fp32:kl_mean<1"):
        check_gate(parse_gate("kl_mean<1"), figures=FIGURES, all_tasks=["kl"], formats={"fp32": False})


def test_every_quantized_row_is_held_to_it_and_every_failure_is_told():
    rows = [
        {"kv": "fp32", "error": 9.0, "layer": 0},
        {"kv": "int8", "error": 0.1, "layer": 0},
        {"kv": "int8", "error": 0.3, "layer": 1},
        {"kv": "kvq.json", "error": math.nan, "layer": 0},
    ]
    found = failures(parse_gate("error<0.2"), rows, FORMATS)
    assert [(one["kv"], one["where"], one["value"]) for one in found] == [
        ("int8", "layer 1", 0.3),
        ("kvq.json", "layer 0", None),
    ]
    assert len(failures(parse_gate("fp32:error<0.2"), rows, FORMATS)) == 1
    assert not failures(parse_gate("int8:error<=0.3"), rows, FORMATS)


@pytest.mark.parametrize("value", [math.nan, None, "0.001", True])
@pytest.mark.parametrize("operator", ["<", ">"])
def test_what_is_not_a_number_fails(value, operator):
    (failure,) = failures(parse_gate(f"kl_mean{operator}0.5"), [{"kv": "int8", "kl_mean": value}], FORMATS)
    assert failure["value"] is None


def test_bounds_of_intervals_are_figures_and_a_missing_interval_fails():
    row = {"kv": "int8", "intervals": {"kl_mean": [0.1, 0.2], "top1_agreement": None}}
    assert not failures(parse_gate("kl_mean_high<=0.2"), [row], FORMATS)
    assert failures(parse_gate("kl_mean_low>0.1"), [row], FORMATS)
    assert failures(parse_gate("top1_agreement_low>0"), [row], FORMATS)
    assert failures(parse_gate("kl_mean<1"), [], FORMATS)[0]["where"] == "not measured"
