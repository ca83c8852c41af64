"""Damaged quantized checkpoints: a typed error that names the file, or tensors that fit.

With a manifest nothing damaged is ever loaded in silence.
"""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from kvq.errors import KVQError, ModelError
from kvq.formats.weights import WeightCode, WeightFormat, parse_weight_format
from kvq.kernels import QuantizedWeight
from kvq.models.describe.checkpoint import read_header, read_json, weight_files
from kvq.models.describe.text_part import _StoredTensors
from kvq.models.loading.prepared import prepare
from kvq.models.loading.quantized import plain_tensors, read_weights
from kvq.models.loading.weights import load_weights
from kvq.models.observe.support import check_supported
from kvq.weights.files import pack_linear, parse_config, quantization_config
from kvq.weights.manifest import MANIFEST, verify_manifest
from kvq.weights.writer import CheckpointWriter
from tests.weights.files.helpers import random_weight
from tests.weights.mutations import mutate

HIDDEN, HEADS, INNER = 32, 4, 64
LAYER = "model.layers.0."
LINEARS = {
    f"{LAYER}self_attn.q_proj": (32, 32),
    f"{LAYER}self_attn.k_proj": (16, 32),
    f"{LAYER}self_attn.v_proj": (16, 32),
    f"{LAYER}self_attn.o_proj": (32, 32),
    f"{LAYER}mlp.gate_proj": (64, 32),
    f"{LAYER}mlp.up_proj": (64, 32),
    f"{LAYER}mlp.down_proj": (32, 64),
}
PLAIN = {
    "model.embed_tokens.weight": (24, 32),
    "model.norm.weight": (32,),
    f"{LAYER}input_layernorm.weight": (32,),
    f"{LAYER}post_attention_layernorm.weight": (32,),
    "lm_head.weight": (24, 32),
}
CONFIG = LlamaConfig(
    vocab_size=24, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, dtype=torch.float16, bos_token_id=None, eos_token_id=None,
    tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
)  # fmt: skip
CHANNELS = WeightFormat(code=WeightCode.INT4)
CASES: dict[str, tuple[str, list[WeightFormat]]] = {
    "compressed-tensors": ("compressed-tensors", [parse_weight_format("int4_g16_asym")]),
    "by row": ("compressed-tensors", [CHANNELS]),
    "mixed": ("compressed-tensors", [parse_weight_format(name) for name in ("int3_g16", "w8a8", "fp8_a8")]),
    "gptq": ("autogptq", [parse_weight_format("int4_g16")]),
    "awq": ("autoawq", [parse_weight_format("int4_g16_asym")]),
}


def write(out: Path, case: str) -> None:
    """One Llama layer in shards."""
    file_format, choices = CASES[case]
    formats = {name: choices[i % len(choices)] for i, name in enumerate(LINEARS)}
    with CheckpointWriter(out, max_shard_bytes=6_000) as writer:
        for i, (name, shape) in enumerate(LINEARS.items()):
            ordered = file_format == "autogptq" and i == 0
            weight = random_weight(formats[name], *shape, seed=i, ordered=ordered)
            writer.add(pack_linear(file_format, name, weight))
        writer.add({name: torch.ones(shape, dtype=torch.float16) for name, shape in PLAIN.items()})
        quantized = quantization_config(file_format, formats, ["lm_head"], kv_scales=False, act_order=True)
        writer.finish({**CONFIG.to_dict(), "quantization_config": quantized})


def load(folder: Path) -> dict[str, QuantizedWeight]:
    """What the loader does before transformers is asked; then, in its place, all names and shapes."""
    verify_manifest(folder)
    config = read_json(folder / "config.json")
    check_supported(config, max_context=None, folder=Path())
    files = weight_files(folder)
    for path in files:
        read_header(path)
    scheme = parse_config(config.get("quantization_config"))
    stored = _StoredTensors(files)
    weights = read_weights(scheme, stored)
    plain = plain_tensors(scheme, stored, weights)
    found = {name: (weight.out_features, weight.in_features) for name, weight in weights.items()}
    if found != LINEARS or {name: tuple(tensor.shape) for name, tensor in plain.items()} != PLAIN:
        raise ModelError(f"{folder}: other names or shapes than config.json has")
    return weights


def check_fits(weight: QuantizedWeight) -> None:
    """Codes, scales, zero points and order are of the types and shapes that kernels rely on."""
    groups = weight.fmt.groups(weight.in_features)
    assert weight.codes.dtype == (torch.int8 if weight.fmt.code is WeightCode.INT8 else torch.uint8)
    assert weight.scale.shape == (weight.out_features, groups)
    assert weight.scale.isfinite().all()
    assert (weight.zero is None) == weight.fmt.symmetric
    assert weight.zero is None or (
        weight.zero.dtype == torch.int8 and weight.zero.shape == weight.scale.shape
    )
    expected = torch.arange(weight.in_features)
    order: Tensor | None = weight.order
    assert order is None or torch.equal(order.sort().values, expected)
    assert weight.dequantize().isfinite().all() or weight.scale.abs().max() > 100


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def changed(folder: Path, whole: dict[str, bytes]) -> list[str]:
    """Files that aren't what they were."""
    found = contents(folder)
    return [name for name, content in whole.items() if found.get(name) != content]


def attack(folder: Path, count: int, seed: int, *, manifest: bool, loader: Any = load) -> int:
    """Damage the folder `count` times and load it each time; returns how many loads were refused."""
    chance, refused = random.Random(seed), 0
    if not manifest:
        (folder / MANIFEST).unlink()
    whole = contents(folder)
    for trial in range(count):
        done = f"trial {trial} of seed {seed}: {mutate(folder, chance)}"
        damaged = changed(folder, whole)
        if damaged and (not manifest or (folder / MANIFEST).exists()):
            refused += _try(folder, done, manifest=manifest, loader=loader)
        for name in damaged:
            (folder / name).write_bytes(whole[name])
    return refused


def _try(folder: Path, done: str, *, manifest: bool, loader: Any) -> int:
    try:
        loaded = loader(folder)
    except KVQError as error:
        message = str(error)
    except BaseException as error:
        raise AssertionError(f"{done}: {error!r}") from error
    else:
        assert not manifest, f"{done}: loaded in silence"
        for weight in (loaded or {}).values():
            check_fits(weight)
        return 0
    named = [str(folder), "config.json", *(path.name for path in folder.iterdir())]
    assert any(name in message for name in named), f"{done}: {message}"
    return 1


@pytest.mark.parametrize("case", CASES)
def test_whole_checkpoints_load(tmp_path: Path, case: str) -> None:
    write(tmp_path / "model", case)
    assert set(load(tmp_path / "model")) == set(LINEARS)
    load_weights(prepare(tmp_path / "model", device="cpu"))


@pytest.mark.parametrize("manifest", [False, True], ids=["plain", "manifest"])
@pytest.mark.parametrize("case", CASES)
def test_damage_is_refused_by_name(tmp_path: Path, case: str, manifest: bool) -> None:
    write(tmp_path / "model", case)
    refused = attack(tmp_path / "model", 100, 1, manifest=manifest)
    assert refused > (93 if manifest else 40)


@pytest.mark.parametrize("manifest", [False, True], ids=["plain", "manifest"])
@pytest.mark.parametrize("case", CASES)
def test_damage_is_refused_by_the_loader_itself(tmp_path: Path, case: str, manifest: bool) -> None:
    write(tmp_path / "model", case)

    def loader(folder: Path) -> None:
        load_weights(prepare(folder, device="cpu"))

    assert attack(tmp_path / "model", 12, 2, manifest=manifest, loader=loader) > 3


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("manifest", [False, True], ids=["plain", "manifest"])
@pytest.mark.parametrize("case", CASES)
def test_much_damage_is_refused_by_name(tmp_path: Path, case: str, manifest: bool, seed: int) -> None:
    write(tmp_path / "model", case)
    attack(tmp_path / "model", 1_000, 100 + seed, manifest=manifest)
    shutil.rmtree(tmp_path / "model")
