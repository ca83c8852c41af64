"""A layer's error is its own: on the same Q, K and V, against attention over unquantized KV."""

from dataclasses import replace

import pytest
import torch

from kvq.calib import observe
from kvq.evals import default_text
from kvq.evals.attention_error import measure_attention
from kvq.evals.divergence import TokenPlan
from kvq.evals.text import spread, token_windows
from kvq.formats import KVRecipe
from tests.helpers_models import VOCAB, load_fp32, save_model

TEXT = default_text().text


STAGED = "int2_mean+sinks=4+recent=5"


@pytest.fixture(scope="module")
def rows(tiny):
    plan = TokenPlan(context=63, max_windows=2)
    found = measure_attention(tiny, ["fp32", "int8", "k8v4", "int4", STAGED], TEXT, plan)
    return {(row.kv, row.layer): row for row in found}


def test_every_layer_of_every_format_has_a_row_but_the_baseline_none(rows):
    assert set(rows) == {(kv, layer) for kv in ("int8", "k8v4", "int4", STAGED) for layer in range(6)}
    assert all(row.tokens == 2 * 63 for row in rows.values())


@pytest.mark.parametrize("kv", ["int4", STAGED])
def test_the_first_layers_error_is_that_of_its_output_in_whole_runs(tiny, rows, kv):
    """Only there are the inputs of runs in different formats the same."""
    errors = []
    for ids in spread(token_windows(tiny.tokenizer, TEXT, context=63), 2):
        a, b = (_first_output(tiny.with_kv(one), ids) for one in (kv, "fp32"))
        errors.append((a - b).norm(dim=1) / b.norm(dim=1))
    error = torch.cat(errors)
    assert rows[kv, 0].error_mean == pytest.approx(float(error.mean()), rel=1e-4)
    assert rows[kv, 0].error_max == pytest.approx(float(error.max()), rel=1e-4)


def _first_output(model, ids):
    """What layer 0's attention hands to its output projection, [tokens, q_heads * head_dim]."""
    seen = []
    projection = model.weights.model.model.layers[0].self_attn.o_proj
    hook = projection.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0].clone()))
    try:
        model.logits(ids)
    finally:
        hook.remove()
    return seen[0][: len(ids)]  # the rest is padding


def test_k_and_v_alone_are_the_formats_of_their_half(rows):
    for layer in range(6):
        assert rows["k8v4", layer].k_error_mean == rows["int8", layer].k_error_mean
        assert rows["k8v4", layer].v_error_mean == rows["int4", layer].v_error_mean
        one = rows["int4", layer]
        assert 0 < max(one.k_error_mean, one.v_error_mean) <= one.error_mean * 1.05 <= one.error_max * 1.05


def test_an_unquantized_half_adds_no_error(tiny):
    found = measure_attention(tiny, ["fp32", "fp32/int4"], TEXT, TokenPlan(context=63, max_windows=1))
    assert all(row.k_error_mean == 0 < row.v_error_mean == row.error_mean for row in found)


def test_halves_of_a_recipe_keep_their_own_centers_and_clips(tiny):
    """A half without its format has no center and no clip either; K alone and V alone make the whole."""
    centers = observe(tiny, TEXT, context=63, max_windows=1).centers()
    recipe = KVRecipe.uniform("int2", tiny.geometry.head_dims)
    layers = tuple(replace(layer, k_clip=0.8, v_clip=0.75) for layer in recipe.layers)
    recipe = replace(recipe, layers=layers, centers=centers, model_digest=tiny.weights.digest)
    plain = measure_attention(tiny, ["fp32", "int2"], TEXT, TokenPlan(context=63, max_windows=1))
    found = measure_attention(tiny, ["fp32", recipe], TEXT, TokenPlan(context=63, max_windows=1))
    for row, other in zip(found[6:], plain[6:], strict=True):
        assert 0 < row.k_error_mean < other.k_error_mean
        assert 0 < row.v_error_mean < other.v_error_mean
        assert row.error_mean < other.error_mean


class _Numbers:
    """A tokenizer whose tokens are characters."""

    bos_token_id = None

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) % VOCAB for c in text]}


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_windows_softcaps_sinks_and_unequal_heads_are_attended_alike(family, tmp_path):
    """With unquantized formats beside each other no layer may differ, chunked windows or not."""
    model = load_fp32(save_model(tmp_path, family))
    model.prepared.__dict__["tokenizer"] = _Numbers()
    found = measure_attention(model, ["fp32", "bf16", "int8"], TEXT, TokenPlan(context=60, max_windows=2))
    errors = {kv: [row.error_mean for row in found if row.kv == kv] for kv in ("bf16", "int8")}
    assert len(errors["bf16"]) == len(model.geometry.layers)
    assert 0 < max(errors["bf16"]) < 0.01
    assert 0 < max(errors["int8"]) < 0.05
