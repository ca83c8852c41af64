"""Mixtures of experts in GGUF files: in blocks from the file to the product, with no copy in floats."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

import kvq
from kvq.capacity.plan.target import make_target
from kvq.engine.steps.reconcile import found_weights
from kvq.models import Model
from kvq.models.gguf.files import read_gguf
from kvq.models.gguf.tensors import GgufTensors
from kvq.models.loading.footprint import planned_weights
from kvq.models.parts.linear import has_own_products
from kvq.sizing.memory import EXPERTS_TERM
from kvq.sizing.parameters import is_counted
from kvq.weights import packed_experts, weight_bytes, weight_count, weight_formats
from tests.helpers_models import build_model, load_fp32, random_tokens, small_config
from tests.models.gguf.kit import Stored, as_blocks, metadata_of, pack, random_blocks, tensors_of, values_of

pytestmark = pytest.mark.skipif(
    not has_own_products(torch.float32, "auto"),
    reason="weights are dequantized where kvq has no fast products",
)
IDS = random_tokens(50, seed=1)
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
TYPES = {  # of gates, the gated rows, and down
    "mixed": ("Q4_K", "Q6_K", "Q8_0"),
    "q4_k_m": ("Q4_K", "Q4_K", "Q6_K"),
    "q4_0": ("Q4_0", "Q4_0", "Q4_0"),
    "beside floats": ("Q5_K", "Q4_0", "F32"),
}


def config_of(family: str) -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    if family == "mixtral":
        return small_config(family, sliding_window=None, **sizes)
    sizes["moe_intermediate_size"] = 256
    config = small_config("qwen3_moe", use_sliding_window=False, norm_topk_prob=True, num_experts=5, **sizes)
    if family == "qwen3_moe":
        return config
    given = config.to_dict() | {"num_experts": 5, "shared_expert_intermediate_size": 256}
    dropped = (
        *("architectures", "head_dim", "model_type", "num_local_experts", "use_sliding_window"),
        "norm_topk_prob",
    )
    return AutoConfig.for_model("qwen2_moe", **{key: x for key, x in given.items() if key not in dropped})


def save_in_types(to: Path, family: str, types: tuple[str, str, str]) -> tuple[Path, Path]:
    """A mixture whose experts are random blocks: as a folder of fp32, and as GGUF."""
    folder = to / "folder"
    build_model(config_of(family)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    tensors = tensors_of(config, weights)
    names = ("gate_proj", "up_proj", "down_proj") if family != "mixtral" else ("w1", "w3", "w2")
    block = "mlp" if family != "mixtral" else "block_sparse_moe"
    for layer in range(config["num_hidden_layers"]):
        for own, name, kind in zip(("gate", "up", "down"), names, types, strict=True):
            place = f"blk.{layer}.ffn_{own}_exps.weight"
            if kind == "F32":
                continue
            count, rows, columns = tensors[place].shape
            seed = 10 * layer + len(own)
            stored = as_blocks(random_blocks(kind, count * rows, columns, seed=seed), kind)
            tensors[place] = Stored(stored.kind, (count, rows, columns), stored.data)
            for expert, values in enumerate(values_of(stored).chunk(count)):
                weights[f"model.layers.{layer}.{block}.experts.{expert}.{name}.weight"] = values.contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    path = to / "model.gguf"
    path.write_bytes(pack(metadata_of(config), tensors))
    return folder, path


@pytest.fixture(scope="module", params=[("qwen3_moe", name) for name in TYPES] + [
    ("mixtral", "mixed"), ("qwen2_moe", "mixed")], ids=str)  # fmt: skip
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    family, types = request.param
    return save_in_types(tmp_path_factory.mktemp("experts"), family, TYPES[types])


def divergence(wanted: Tensor, found: Tensor) -> float:
    """Mean KL divergence over the tokens."""
    log, other = (x.double().log_softmax(-1) for x in (wanted, found))
    return float((log.exp() * (log - other)).sum(-1).mean())


def dequantized_experts(path: Path, patch: pytest.MonkeyPatch, **options: Any) -> tuple[Model, list[str]]:
    """The loaded model, and the experts whose values were asked for."""
    asked, own = list[str](), GgufTensors.__getitem__

    def values(self: GgufTensors, name: str) -> Tensor:
        asked.append(name)
        return own(self, name)

    patch.setattr(GgufTensors, "__getitem__", values)
    model = load_fp32(path, **options)
    stored = read_gguf(path).sources
    return model, [name for name in asked if ".experts." in name and not stored[name].tensor.kind.is_float]


def test_logits_are_those_of_the_values(saved: tuple[Path, Path]) -> None:
    wanted = load_fp32(saved[0]).logits(IDS)
    full = load_fp32(saved[1], activations="full").logits(IDS)
    rounded = load_fp32(saved[1]).logits(IDS)
    assert divergence(wanted, full) < 1e-6
    assert divergence(wanted, full) < divergence(wanted, rounded) < 0.02


def test_no_expert_becomes_floats(saved: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, dequantized = dequantized_experts(saved[1], monkeypatch)
    assert dequantized == []
    inner, file = model.weights.model, read_gguf(saved[1])
    kinds = {one.kind.name for name, one in file.tensors.items() if "_exps" in name and not one.kind.is_float}
    assert {fmt.name for fmt in weight_formats(inner)} == kinds
    assert len(packed_experts(inner)) == 2
    stored = sum(one.end - one.begin for one in file.tensors.values())
    assert stored <= weight_bytes(inner) < 1.02 * stored
    assert weight_count(inner) == weight_count(load_fp32(saved[0]).weights.model)


def test_the_plan_counts_their_blocks(saved: tuple[Path, Path]) -> None:
    model = load_fp32(saved[1])
    if not is_counted(model.geometry.model_type):
        pytest.skip("a family of unlisted layers")
    planned = {term.name: term.nbytes for term in planned_weights(model.prepared)}
    assert found_weights(model.weights.model)[EXPERTS_TERM] == planned[EXPERTS_TERM]
    stacks = [one for name, one in read_gguf(saved[1]).tensors.items() if "_exps" in name]
    file = sum(one.end - one.begin for one in stacks)
    assert file <= planned[EXPERTS_TERM] < 1.03 * file
    on_gpu = {term.name: term.nbytes for term in make_target(saved[1]).terms()}
    assert on_gpu[EXPERTS_TERM] == 2 * sum(math.prod(one.shape) for one in stacks), "dequantized there"


@pytest.mark.parametrize("activations", ["auto", "full"])
def test_a_token_has_the_same_bits_in_any_step(saved: tuple[Path, Path], activations: str) -> None:
    model = load_fp32(saved[1], activations=activations)
    whole = model.logits(IDS)
    for size in (1, 7, 23):
        assert torch.equal(model.logits(IDS, chunk=size), whole), size
    assert model.weights.step_rows(3) == 3, "nothing is padded"


def test_other_backends_take_the_values(saved: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, dequantized = dequantized_experts(saved[1], monkeypatch, backend="reference")
    assert dequantized
    assert divergence(load_fp32(saved[0]).logits(IDS), model.logits(IDS)) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_in_16_bits(family: str, tmp_path: Path) -> None:
    folder, path = save_in_types(tmp_path, family, TYPES["mixed"])
    model = kvq.load(path, kv="fp32", device="cpu", dtype="bf16")
    assert len(packed_experts(model.weights.model)) == 2
    wanted = load_fp32(folder).logits(IDS)
    assert divergence(wanted, model.logits(IDS).float()) < 0.05
