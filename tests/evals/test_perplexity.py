"""Measured through the session's own path, against numbers computed apart from it."""

import math

import pytest
import torch

import kvq
from kvq.errors import ConfigError, RequestError
from kvq.evals import default_text, measure_perplexity
from kvq.evals.divergence import TokenPlan
from kvq.evals.perplexity import instrument_check
from kvq.evals.text import token_windows
from kvq.evals.watch import Watch

TEXT = default_text().text


def test_perplexity_kl_and_agreement_are_those_of_the_logits(tiny):
    rows = measure_perplexity(tiny, ["fp32", "int2_g32"], TEXT, TokenPlan(context=96, max_windows=2))
    nll, kls, agree = 0.0, [], []
    for ids in token_windows(tiny.tokenizer, TEXT, context=96, max_windows=2):
        full = tiny.with_kv("fp32").logits(ids).double().log_softmax(-1)[:-1]
        int2 = tiny.with_kv("int2_g32").logits(ids).double().log_softmax(-1)[:-1]
        nll -= float(int2.gather(1, torch.tensor(ids[1:])[:, None]).sum())
        kls.append((full.exp() * (full - int2)).sum(-1))
        agree.append((full.argmax(-1) == int2.argmax(-1)).double())
    kl = torch.cat(kls)
    assert rows[1].tokens == 2 * 95
    assert rows[1].perplexity == pytest.approx(math.exp(nll / rows[1].tokens), rel=1e-5)
    assert rows[1].kl_mean == pytest.approx(float(kl.mean()), rel=1e-3)
    assert rows[1].kl_p999 == pytest.approx(float(kl.quantile(0.999)), rel=1e-3)
    assert rows[1].top1_agreement == pytest.approx(float(torch.cat(agree).mean()))
    assert rows[1].perplexity_change == pytest.approx(rows[1].perplexity / rows[0].perplexity - 1)
    assert (rows[0].kl_mean, rows[0].top1_agreement, rows[0].perplexity_change) == (0, 1, 0)


def test_fp32_blocks_give_the_perplexity_of_transformers_own_attention(tiny):
    ids = token_windows(tiny.tokenizer, TEXT, context=128, max_windows=1)[0]
    model = tiny.weights.model
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            loss = float(model(torch.tensor([ids]), labels=torch.tensor([ids])).loss)
    finally:
        model.set_attn_implementation("kvq")
    row = measure_perplexity(tiny, ["fp32"], TEXT, TokenPlan(context=128, max_windows=1))[0]
    assert row.perplexity == pytest.approx(math.exp(loss), rel=1e-5)


@pytest.mark.parametrize(
    "kv", ["fp32", *(pytest.param(x, marks=pytest.mark.long) for x in ("fp8", "int8")), "int4"]
)
def test_chunk_size_does_not_change_perplexity(tiny, kv):
    whole = measure_perplexity(tiny, [kv], TEXT, TokenPlan(context=128, max_windows=2))[-1].perplexity
    for chunk in (1, 7, 64):
        got = measure_perplexity(tiny, [kv], TEXT, TokenPlan(context=128, max_windows=2, chunk=chunk))[
            -1
        ].perplexity
        assert abs(got / whole - 1) < 1e-4, chunk


def test_sizes_are_those_of_the_layout(tiny):
    row = measure_perplexity(tiny, ["fp32", "k8v4"], TEXT, TokenPlan(context=64, max_windows=1))[1]
    assert row.bits_per_element == 6.5  # (8 + 16 / 32 + 4.5) / 2 in blocks of 32
    assert row.kv_bytes_per_token == tiny.with_kv("k8v4").kv_bytes_per_token == 6 * 2 * (68 + 36)
    assert row.compression == pytest.approx(3072 / row.kv_bytes_per_token)


def test_the_first_unquantized_format_is_the_baseline_wherever_it_stands(tiny):
    rows = measure_perplexity(tiny, ["int2_g32", "bf16", "fp32"], TEXT, TokenPlan(context=64, max_windows=1))
    assert {r.kv: r.kl_mean == 0 for r in rows} == {"bf16": True, "int2_g32": False, "fp32": False}


def test_without_an_unquantized_format_the_weights_own_type_joins_as_the_baseline(tiny):
    rows = measure_perplexity(tiny, ["int4"], TEXT, TokenPlan(context=64, max_windows=1))
    assert [r.kv for r in rows] == ["auto", "int4"] or [r.kv for r in rows] == ["fp32", "int4"]
    assert rows[0].kl_mean == 0 < rows[1].kl_mean


def test_rows_come_back_from_the_library_with_the_promised_keys():
    rows = kvq.perplexity("tiny", kv=["fp32", "int4"], text=TEXT, context=64, max_windows=1)
    promised = {
        "kv", "bits_per_element", "kv_bytes_per_token", "compression", "tokens", "perplexity",
        "perplexity_change", "kl_mean", "kl_p999", "top1_agreement", "seconds",
    }  # fmt: skip
    assert all(promised <= set(row) for row in rows)


def test_a_shorter_attention_window_is_a_shorter_attention_window(tiny):
    full, cut = (
        measure_perplexity(tiny, ["fp32"], TEXT, TokenPlan(context=96, max_windows=1, attention_window=w))[0]
        for w in (None, 2)
    )
    assert cut.perplexity > 1.2 * full.perplexity
    same = measure_perplexity(
        tiny, ["fp32"], TEXT, TokenPlan(context=96, max_windows=1, attention_window=96)
    )[0]
    assert same.perplexity == pytest.approx(full.perplexity, rel=1e-6)


def test_the_instrument_check_fails_an_instrument_that_can_not_see(tiny):
    rows = measure_perplexity(tiny, ["fp32"], TEXT, TokenPlan(context=64, max_windows=1, instrument=True))
    check = instrument_check(rows)
    assert check["window_change"] == pytest.approx(0, abs=1e-6)  # 64 tokens of context have no 65th
    assert check["passed"] is False


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"context": 5000}, RequestError, "--context 5000 is beyond .* 4096"),
        ({"context": 64, "chunk": 0}, RequestError, "chunk must be at least 1"),
        ({"context": 64, "attention_window": 0}, RequestError, "at least 1 token"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(tiny, options, error, says):
    with pytest.raises(error, match=says):
        measure_perplexity(tiny, ["fp32"], TEXT, TokenPlan(**options))


def test_one_unknown_format_among_several_is_refused_before_any_work(tiny):
    calls = []
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        measure_perplexity(
            tiny, ["fp32", "int9"], TEXT, TokenPlan(context=64), Watch(lambda *a: calls.append(a))
        )
    assert not calls


def test_progress_counts_up_to_its_total(tiny):
    calls = []
    measure_perplexity(
        tiny,
        ["fp32", "int4"],
        TEXT,
        TokenPlan(context=64, max_windows=2, chunk=32),
        Watch(lambda *a: calls.append(a)),
    )
    assert calls == [(i, 8) for i in range(1, 9)]
