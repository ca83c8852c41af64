"""What is kept of every token, against the logits of the formats apart."""

import numpy as np
import pytest
import torch

from kvq.evals import default_text
from kvq.evals.divergence import TokenPlan, measure_tokens, with_baseline
from kvq.evals.text import token_windows

TEXT = default_text().text


def test_every_tokens_figures_are_those_of_its_logits_whatever_the_chunk(tiny):
    found = measure_tokens(tiny, ["fp32", "int2_g32"], TEXT, TokenPlan(context=63, max_windows=2, chunk=17))
    assert [one.model.recipe.name for one in found] == ["fp32", "int2_g32"]
    for window, ids in enumerate(token_windows(tiny.tokenizer, TEXT, context=63, max_windows=2)):
        full, int2 = (
            tiny.with_kv(kv).logits(ids).double().log_softmax(-1)[:-1] for kv in ("fp32", "int2_g32")
        )
        for position, (a, b) in enumerate(zip(full, int2, strict=True)):
            got = found[1]
            assert got.nll[window, position] == pytest.approx(-float(b[ids[position + 1]]), rel=1e-3)
            assert got.kl[window, position] == pytest.approx(float((a.exp() * (a - b)).sum()), rel=1e-2)
            assert got.top1[window, position] == (a.argmax() == b.argmax())
            likeliest = [set(x.topk(5).indices.tolist()) for x in (a, b)]
            assert got.top5[window, position] == pytest.approx(len(likeliest[0] & likeliest[1]) / 5)
    assert np.all(found[0].kl == 0)
    assert np.all(found[0].top5 == 1)


def test_what_is_kept_are_four_numbers_a_token(tiny):
    (one,) = measure_tokens(tiny, ["fp32"], TEXT, TokenPlan(context=40, max_windows=3))
    for kept in (one.nll, one.kl, one.top1, one.top5):
        assert (kept.shape, kept.dtype) == ((3, 39), np.float32)
    assert one.nll.size == 117


def test_the_baseline_leads_and_the_others_keep_their_order(tiny):
    names = [m.recipe.name for m in with_baseline(tiny, ["int4", "bf16", "int8", "fp32"])]
    assert names == ["bf16", "int4", "int8", "fp32"]
    assert [m.recipe.name for m in with_baseline(tiny, ["int4"])] == ["fp32", "int4"]
    assert torch.float32 is next(tiny.weights.model.parameters()).dtype
