"""Models loaded as exact: those whose bits depend on the batch are refused by name."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from kvq.errors import ConfigError, ModelError
from kvq.models import load
from kvq.models.observe.tiny_copy import build_tiny_copy
from kvq.models.prove.exactness import check_exact
from kvq.weights.linear import PackedLinear
from tests.helpers_hybrids import hybrid_folder
from tests.helpers_models import random_tokens, save_model
from tools.model_table import GIVEN

# Layers in C++ and in the model's own code; activations in torch, whose widths of 80 leave remainders;
# GPT-2's convolutions; experts; windows; latents.
FAMILIES = ["llama", "gpt2", "starcoder2", "gpt_neox", "mixtral", "gemma3_text", "deepseek_v3"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_families_are_exact_alone_in_chunks_and_in_a_batch(family, kv, tmp_path):
    model = load(save_model(tmp_path, family), kv, dtype="fp32", device="cpu", block_size=16, exact=True)
    ids = random_tokens(60, seed=1)
    whole = model.logits(ids)
    for chunk in (1, 7, 33):
        assert torch.equal(model.logits(ids, chunk=chunk), whole)


def test_routers_within_routers_are_exact_and_keep_their_weights(tmp_path):
    config = AutoConfig.for_model("hunyuan_v1_moe", **GIVEN["hunyuan_v1_moe"]).to_dict()
    build_tiny_copy(config).save_pretrained(tmp_path)
    options = {"dtype": "fp32", "device": "cpu", "exact": True}
    for weights in ({}, {"weights": "int8"}):
        model = load(tmp_path, "int8", **options, **weights)
        assert model.weights.model.model.layers[0].mlp.gate.wg.weight.dtype is torch.float32


def test_16_bits_need_products_of_kvqs_own(tmp_path):
    """Rounding hides that torch's products depend on the batch in all but a few tokens of a thousand."""
    options = {"device": "cpu", "dtype": "bf16", "exact": True}
    for family in ("llama", "gpt2", "gemma2"):
        assert load(save_model(tmp_path / family, family), "int8", **options).prepared.exact
    with pytest.raises(
        ModelError, match=r"can't be exact in 16 bits: model\.layers\.0\.mlp\S+ is multiplied by torch"
    ):
        load(save_model(tmp_path / "mixtral", "mixtral"), "int8", **options)


def test_models_with_few_tokens_of_context_are_checked_too(tmp_path):
    folder = save_model(tmp_path, "llama", max_position_embeddings=12)
    assert load(folder, "int8", dtype="fp32", device="cpu", exact=True).prepared.exact


def test_states_that_are_computed_in_chunks_are_refused_with_the_module():
    with pytest.raises(
        ModelError, match=r"qwen3_next can't be exact here: model\.layers\.0\.\S+ \(\w+\), or what"
    ):
        load(hybrid_folder("qwen3_next"), "int8", dtype="fp32", device="cpu", exact=True)


def test_a_sum_whose_order_depends_on_the_batch_is_found(tmp_path, monkeypatch):
    model = load(save_model(tmp_path, "gpt_neox"), "int8", dtype="fp32", device="cpu", exact=True)
    right, name = PackedLinear.forward, "gpt_neox.layers.1.mlp.dense_4h_to_h"
    victim = model.weights.model.get_submodule(name)

    def forward(self, input):
        found = right(self, input)
        if self is not victim or found.numel() // self.out_features % 2:
            return found
        half = input * (torch.arange(self.in_features) < self.in_features // 2)
        return right(self, half) + right(self, input - half) - self.bias

    monkeypatch.setattr(PackedLinear, "forward", forward)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        check_exact(model.weights, model.layout)


def test_another_format_is_checked_again(tmp_path, monkeypatch):
    model = load(save_model(tmp_path, "llama"), "int8", dtype="fp32", device="cpu", exact=True)
    checked = []
    monkeypatch.setattr(
        "kvq.models.model.check_exact", lambda weights, layout: checked.append(layout.recipe.name)
    )
    assert model.with_kv("fp8").recipe.name == checked[0]


@pytest.mark.parametrize(("option", "value"), [("cache", "dense"), ("exact", "yes")])
def test_what_can_not_be_exact_is_refused_before_weights_are_read(option, value):
    with pytest.raises(ConfigError, match="exact"):
        load("tiny", "int4", **({"exact": True} | {option: value}))


def test_the_functions_of_torch_are_restored_after_a_step(tmp_path):
    model = load(save_model(tmp_path, "starcoder2"), "int8", dtype="fp32", device="cpu", exact=True)
    model.logits([5, 6, 7])
    assert not torch.overrides._get_current_function_mode_stack(), "no mode is left"
    assert isinstance(model.weights.model, nn.Module)
