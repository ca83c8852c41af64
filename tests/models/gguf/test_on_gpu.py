"""GGUF models as on a GPU: weights stay in blocks that its kernels multiply, which are interpreted here."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvq
from benchmarks.as_on_gpu import _Hopper
from kvq.formats.ggml import GGML_TYPES
from kvq.formats.weights import Inputs
from kvq.kernels.linear.triton import TritonLinear
from kvq.models.gguf.files import read_gguf
from kvq.models.loading import footprint, skeleton, weights
from kvq.models.loading.footprint import planned_weights
from kvq.models.loading.fused_layers import is_fused
from kvq.models.loading.prepared import prepare
from kvq.models.loading.skeleton import keeps_blocks
from kvq.models.loading.weights import LoadedWeights, load_weights
from kvq.weights import QuantizedLinear, weight_bytes
from kvq.weights.install import JoinedPart
from tests.helpers_models import load_fp32, random_tokens, save_model
from tests.models.gguf.kit import as_blocks, metadata_of, pack, permuted, random_blocks, tensors_of, values_of
from tests.models.gpu_kit import as_on_gpu, load_as_on_gpu

IDS = random_tokens(9, seed=1)
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q8_0", "output": "Q4_0"}
ROWS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def save_mixed(tmp_path: Path, kinds: Mapping[str, str], **changes: Any) -> tuple[Path, Path]:
    """A llama as fp32 and as GGUF, whose matrices are Q4_K unless `kinds` says otherwise."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}  # interpreting takes long
    folder = save_model(tmp_path / "folder", "llama", **sizes, **changes)
    config = json.loads((folder / "config.json").read_text())
    whole = load_file(folder / "model.safetensors")
    tensors = tensors_of(config, whole)
    places = {own: name for name, own in zip(whole, tensors_of(config, whole), strict=True)}
    for seed, (own, one) in enumerate(tensors.items()):
        if len(one.shape) == 2:
            part = own.split(".")[-2]
            kind = kinds.get(part, "Q4_K")
            tensors[own] = as_blocks(random_blocks(kind, *one.shape, seed=seed), kind)
            values = values_of(tensors[own])
            if part in ROWS:
                order = permuted(torch.arange(len(values))[:, None].float(), config[ROWS[part]])
                values = values[order.flatten().long().argsort()]
            whole[places[own]] = values
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    (path := tmp_path / "mixed.gguf").write_bytes(pack(metadata_of(config), tensors))
    return folder, path


@pytest.fixture(autouse=True)
def no_kernels_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skeleton, "Device", _Hopper)
    for module in (weights, footprint):
        monkeypatch.setattr(module, "has_own_products", lambda *_: False)


def load_on_gpu(path: Path, **options: Any) -> kvq.Model:
    """The model as a GPU would hold it, where inputs are never rounded."""
    with as_on_gpu():
        return load_as_on_gpu(path, activations="full", **options)


def layers_of(model: LoadedWeights) -> dict[str, Any]:
    return dict(model.model.named_modules())


def test_layers_stay_in_their_blocks(tmp_path: Path) -> None:
    folder, path = save_mixed(tmp_path, MIXED)
    with as_on_gpu():
        found = load_weights(prepare(path, device="cpu", dtype="fp32", activations="full"))
    layers, whole = layers_of(found), load_file(folder / "model.safetensors")
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    for name, kind in (("self_attn.q_proj", "Q4_K"), ("self_attn.v_proj", "Q6_K"), ("mlp.up_proj", "Q4_K")):
        layer = layers[f"model.layers.0.{name}"]
        assert isinstance(layer, QuantizedLinear)
        assert (layer.fmt.name, layer.backend) == (kind, "triton")
        assert isinstance(layer.kernel, JoinedPart)
        wanted = x @ whole[f"model.layers.0.{name}.weight"].T
        assert (layer(x) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert isinstance(layers["lm_head"].kernel, TritonLinear)
    assert isinstance(layers["model.layers.0.mlp.down_proj"], torch.nn.Linear)  # of a type without a kernel
    assert isinstance(layers["model.embed_tokens"], torch.nn.Embedding)
    check_planned(found)


@pytest.mark.long
def test_logits_are_those_of_the_dequantized_model(tmp_path: Path) -> None:
    folder, path = save_mixed(tmp_path, MIXED)
    found = load_on_gpu(path)
    assert is_fused(found.weights.model)
    wanted = load_fp32(folder).logits(IDS)
    assert (found.logits(IDS) - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.long
def test_a_head_that_is_the_embedding_stays_one_with_it(tmp_path: Path) -> None:
    folder, path = save_mixed(tmp_path, {}, tie_word_embeddings=True)
    found = load_on_gpu(path)
    layers = layers_of(found.weights)
    assert layers["lm_head"].weight is layers["model.embed_tokens"].weight
    assert isinstance(layers["model.layers.0.mlp.down_proj"].kernel, TritonLinear)
    check_planned(found.weights)
    wanted = load_fp32(folder).logits(IDS)
    assert (found.logits(IDS) - wanted).abs().max() < 1e-4 * wanted.abs().max()


def check_planned(model: LoadedWeights) -> None:
    """Blocks are counted as blocks; outputs are padded to a multiple of 64."""
    planned = sum(term.nbytes for term in planned_weights(model.prepared))
    assert planned <= weight_bytes(model.model) < 1.02 * planned


def test_the_reference_dequantizes(tmp_path: Path) -> None:
    path = save_mixed(tmp_path, MIXED)[1]
    for backend, keeps in (("auto", True), ("triton", True), ("reference", False)):
        prepared = prepare(path, device="cpu", backend=backend, activations="full")
        assert keeps_blocks(GGML_TYPES["Q4_K"], prepared) is keeps
        assert not keeps_blocks(GGML_TYPES["Q5_K"], prepared)
        linear = planned_weights(prepared)[0].formula
        assert ("q4_k" in linear) is keeps


def test_inputs_are_rounded_on_cpus_only(tmp_path: Path) -> None:
    path = save_mixed(tmp_path, MIXED)[1]
    assert prepare(path, device="cpu").block_inputs is Inputs.GROUPS
    with patch("kvq.models.loading.prepared.pick_device", lambda name: torch.device("cuda")):
        assert prepare(path, dtype="bf16").block_inputs is Inputs.FULL
    assert {name for name, kind in GGML_TYPES.items() if kind.on_gpus} == {"Q4_0", "Q8_0", "Q4_K", "Q6_K"}
    assert read_gguf(path).types["lm_head"].name == "Q4_0"
