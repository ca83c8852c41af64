"""Folding: found in every family by running it, proven, and undone where it would change anything."""

import pytest
import torch
from torch import nn

from kvq.calib.quantize.walk import Walk
from kvq.weights.folding import Fold, apply_fold, find_folds, trace_inputs, undoing
from tests.helpers_models import FAMILY_OPTIONS, build_model, random_tokens, small_config

DENSE = sorted(set(FAMILY_OPTIONS) - {"gpt2", "gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3"})
NORMED_AFTER = ("exaone4", "olmo2", "olmo3")  # no norm before their projections
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def walk_of(family):
    config = small_config(family)
    config._attn_implementation = "eager"
    return config, Walk(build_model(config), [random_tokens(32, seed=1)], torch.device("cpu"))


def folds_of(config, walk):
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer, run = walk.layers[0], lambda: walk.probe(0)
    with torch.no_grad():
        return find_folds(layer, run, trace_inputs(layer, run), head_dim=head_dim)


@pytest.mark.parametrize("family", DENSE)
def test_uneven_scales_leave_no_trace_in_the_outputs_of_any_family(family):
    config, walk = walk_of(family)
    layer, (folds, skipped) = walk.layers[0], folds_of(config, walk)
    before = walk.probe(0)
    for number, fold in enumerate(folds):
        weight = layer.get_submodule(fold.names[0]).weight.clone()
        scale = torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(number)) + 0.5
        apply_fold(layer, fold, scale if fold.tied is None else scale[fold.tied])
        assert not torch.equal(layer.get_submodule(fold.names[0]).weight, weight)
    assert (walk.probe(0) - before).abs().max() <= 3e-5 * before.abs().max()
    linears = {name for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    assert {name for fold in folds for name in fold.names} | set(skipped) == linears


def test_llama_takes_scales_everywhere_grouped_heads_included():
    config, walk = walk_of("llama")
    folds, _ = folds_of(config, walk)
    assert [(fold.names, fold.source) for fold in folds] == [
        (QKV, "input_layernorm"),
        (("self_attn.o_proj",), "self_attn.v_proj"),
        (("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
        (("mlp.down_proj",), "mlp.up_proj"),
    ]
    head_dim = config.hidden_size // config.num_attention_heads
    tied = folds[1].tied.view(config.num_attention_heads, head_dim)
    assert torch.equal(tied[0], tied[1])  # two query heads of one KV head
    assert not torch.equal(tied[1], tied[2])


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_gemmas_norms_multiply_by_one_more_than_their_weight(family):
    config, walk = walk_of(family)
    norms = [fold for fold in folds_of(config, walk)[0] if fold.tied is None]
    assert len(norms) == 2
    assert {fold.offset for fold in norms} == {1.0}


@pytest.mark.parametrize("family", NORMED_AFTER)
def test_a_layer_without_a_norm_before_it_is_said_to_take_none(family):
    config, walk = walk_of(family)
    _, skipped = folds_of(config, walk)
    assert set(QKV) <= set(skipped)
    assert "no place before it" in skipped[QKV[0]]


def test_a_norms_rounding_is_made_up_for_by_the_weights():
    config, walk = walk_of("llama")
    layer = walk.layers[0]
    fold = folds_of(config, walk)[0][0]
    before = walk.probe(0)
    with torch.no_grad():
        layer.input_layernorm.weight.copy_(layer.input_layernorm.weight.bfloat16())
    before = walk.probe(0)
    asked = torch.rand(64, generator=torch.Generator().manual_seed(1)) + 0.5
    scale = apply_fold(layer, fold, asked, torch.bfloat16)
    weight = layer.input_layernorm.weight
    assert torch.equal(weight, weight.bfloat16().float())
    assert (walk.probe(0) - before).abs().max() <= 1e-5 * before.abs().max()
    assert torch.allclose(scale, asked, rtol=2**-7)


def test_a_norm_with_another_reader_takes_no_scales():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(16)
            self.first = nn.Linear(16, 16)
            self.second = nn.Linear(16, 8)

        def forward(self, x):
            y = self.norm(x)
            return self.first(y) + y, self.second(y)

    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(1, 5, 16)
    with torch.no_grad():
        shared = trace_inputs(layer, lambda: layer(x)[0])
        folds, skipped = find_folds(layer, lambda: layer(x)[0], shared)
    assert shared[0][0] == ("first", "second")
    assert not folds
    assert set(skipped) == {"first", "second"}


def test_a_fold_is_undone_to_the_bit():
    config, walk = walk_of("starcoder2")
    layer = walk.layers[0]
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    for fold in folds_of(config, walk)[0]:
        undo = undoing(layer, fold)
        apply_fold(layer, fold, torch.full((layer.get_submodule(fold.names[0]).in_features,), 1.7))
        undo()
    assert all(torch.equal(p, before[name]) for name, p in layer.named_parameters())


def test_a_norm_weight_of_zero_stays_zero_and_its_scale_is_one():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.RMSNorm(8), nn.Linear(8, 4)

    layer = Layer()
    with torch.no_grad():
        layer.norm.weight[3] = 0
    scale = apply_fold(layer, Fold(names=("linear",), source="norm"), torch.full((8,), 2.0))
    assert scale[3] == 1
    assert layer.norm.weight[3] == 0
    assert layer.norm.weight[0] == 0.5
