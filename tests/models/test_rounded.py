"""Weights that are rounded while a model is loaded: the same logits as a plain model with those weights."""

import functools
from pathlib import Path

import pytest
import torch

import kvq
from kvq.errors import ConfigError, ModelError
from kvq.formats.weights import WEIGHT_NAMES, parse_weight_format
from kvq.weights import quantized_layers, round_weight, weight_bytes
from tests.helpers_models import build_model, save_model, small_config

IDS = [(37 * i + 11) % 4096 for i in range(70)]


@functools.cache
@torch.inference_mode()
def dequantized_logits(folder: Path, name: str) -> torch.Tensor:
    """Of transformers' own model whose Linear layers hold the rounded weights; head 8 bits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    fmt = parse_weight_format(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            own = parse_weight_format("int8") if module is model.lm_head and fmt.code.is_integer else fmt
            rounded = round_weight(module.weight, own).dequantize(torch.float32)
            module.weight = torch.nn.Parameter(rounded)
    return model(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["int8", "int4", "int4_g32_asym", "int3_g64", "fp8"])
def test_logits_are_those_of_the_dequantized_weights(name: str, backend: str, two_layers: Path) -> None:
    model = kvq.load(two_layers, weights=name, backend=backend)
    wanted = dequantized_logits(two_layers, name)
    error = (model.logits(IDS) - wanted).abs().max() / wanted.abs().max()
    assert error < (2e-5 if backend == "reference" else 2e-4)
    layers = quantized_layers(model.weights.model)
    assert len(layers) == 2 * 7 + 1
    assert layers["lm_head"].fmt.name == ("fp8" if name == "fp8" else "int8")


@pytest.mark.parametrize("name", ["w8a8", "w4a8", "fp8_a8"])
def test_rounded_inputs_cost_little_beside_rounded_weights(name: str) -> None:
    plain = kvq.load("tiny").logits(IDS)
    fmt = {"w8a8": "int8", "w4a8": "int4", "fp8_a8": "fp8"}[name]
    rounded, weights_only = (kvq.load("tiny", weights=x).logits(IDS) for x in (name, fmt))
    assert torch.isfinite(rounded).all()
    assert (rounded - weights_only).norm() < (weights_only - plain).norm() * 3
    assert not torch.equal(rounded, weights_only)


def test_codes_take_the_bytes_that_their_format_says() -> None:
    plain = weight_bytes(kvq.load("tiny", backend="reference").weights.model)  # fp32
    int8, int4 = (kvq.load("tiny", weights=name) for name in ("int8", "int4"))
    linear = sum(x.in_features * x.out_features for x in quantized_layers(int8.weights.model).values())
    head = 256 * 4096
    assert weight_bytes(int8.weights.model) < plain - 4 * (linear - head) + linear * 1.05
    assert (
        weight_bytes(int4.weights.model) < plain - 4 * (linear - head) + head * 1.05 + (linear - head) * 0.6
    )
    assert int4.description == "llama, 5.77 M parameters, weights in int4_g128, int8"


def test_a_format_that_does_not_exist_or_fit_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match="unknown weight format 'int5'; did you mean 'int"):
        kvq.load("tiny", weights="int5")
    save_model(tmp_path, "llama", hidden_size=96, head_dim=24)
    with pytest.raises(
        ConfigError, match=r"q_proj: groups of 128 don't divide 96 inputs; use one of \[32, 16, 8\]"
    ):
        kvq.load(tmp_path, weights="int4")
    with pytest.raises(
        ConfigError, match=r"down_proj: groups of 32 don't divide 80 inputs; use one of \[16, 8\]"
    ):
        kvq.load(tmp_path, weights="int4_g32")
    assert kvq.load(tmp_path, weights="int4_g16").logits([1, 2, 3]).isfinite().all()


@pytest.mark.parametrize("name", [*WEIGHT_NAMES, "int4_channel", "int3_channel_asym", "int8_g64_asym_a8"])
def test_every_name_is_read_back_from_the_format_it_names(name: str) -> None:
    fmt = parse_weight_format(name)
    assert parse_weight_format(fmt.name) == fmt


def test_one_engine_holds_codes_of_weights_and_of_kv() -> None:
    llm = kvq.LLM("tiny", kv="int4", weights="int4_g64", kv_memory="8MiB")
    one, two = llm.generate(["The quick brown fox", "import os"], kvq.SamplingParams(max_tokens=12))
    assert len(one.outputs[0].token_ids) == len(two.outputs[0].token_ids) == 12


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_not_rounded_away(bad: float, tmp_path) -> None:
    model = build_model(small_config("llama"))
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[3, 5] = bad
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"layers.1.self_attn.q_proj.weight holds NaN or infinity"):
        kvq.load(tmp_path, weights="fp8")


def test_a_format_must_be_a_name() -> None:
    with pytest.raises(ConfigError, match="weights must be str"):
        kvq.load("tiny", weights=8)
