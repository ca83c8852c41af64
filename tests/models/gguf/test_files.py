"""Models from GGUF files compute what the same weights compute from a folder of safetensors."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import kvq
from kvq.errors import ConfigError, ModelError
from kvq.formats import KVRecipe
from kvq.formats.ggml import GGML_TYPES
from kvq.formats.weights import Inputs
from kvq.models.describe.resolve import resolve_model
from kvq.models.describe.text_part import read_tensors
from kvq.models.gguf.files import read_gguf
from kvq.models.gguf.tensors import GgufTensors
from kvq.models.loading.prepared import find_scales, prepare
from kvq.models.parts.linear import has_own_products
from kvq.weights import QuantizedLinear, weight_bytes, weight_count
from tests.helpers_models import (
    assert_same_logits,
    build_model,
    load_fp32,
    random_tokens,
    save_model,
    small_config,
)
from tests.models.gguf.kit import (
    Stored,
    as_blocks,
    convert,
    metadata_of,
    pack,
    permuted,
    random_blocks,
    tensors_of,
    values_of,
)

# Without what GGUF can't say: windows of Qwen, other scales of Gemma's scores, layers without RoPE by number
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 24}, "gemma3_text": {"query_pre_attn_scalar": 24},
    "qwen2": {"use_sliding_window": False}, "arcee": {}, "cohere": {},
    "cohere2": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "exaone4": {}, "gemma": {"tie_word_embeddings": True}, "gemma2": {"query_pre_attn_scalar": 24},
    "glm4": {}, "granite": {"head_dim": 16}, "mixtral": {"sliding_window": None}, "olmo2": {}, "olmo3": {},
    "phi3": {"sliding_window": 16}, "qwen3": {"use_sliding_window": False},
    "qwen3_moe": {"use_sliding_window": False, "norm_topk_prob": True}, "seed_oss": {},
    "smollm3": {"no_rope_layers": None, "num_hidden_layers": 5},
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
IDS = random_tokens(40, seed=1)
VECTOR, Q8_0 = Stored(0, (64,), bytes(4 * 64)), Stored(8, (64,), bytes(2 * 34))


@pytest.mark.daily(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_folder(tmp_path: Path, family: str) -> None:
    folder = save_model(tmp_path / "folder", family, **FAMILIES[family])
    assert_same_logits(IDS, folder, convert(folder, tmp_path / "model.gguf"))


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": LINEAR}),
        ("llama", {"mlp_bias": True, "rope_parameters": YARN, "num_key_value_heads": 4}),
        ("qwen3", {"use_sliding_window": False, "rope_parameters": YARN}),
        ("glm4", {"attention_bias": True, "num_key_value_heads": 1}),
    ],
)
def test_biases_and_scaled_positions(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    folder = save_model(tmp_path / "folder", family, **changes)
    assert_same_logits(IDS, folder, convert(folder, tmp_path / "model.gguf"))


def test_experts_beside_a_shared_one(tmp_path):
    given = small_config("qwen3_moe").to_dict() | {"num_experts": 4, "shared_expert_intermediate_size": 48}
    dropped = ("architectures", "head_dim", "model_type", "num_local_experts", "use_sliding_window")
    config = AutoConfig.for_model("qwen2_moe", **{key: x for key, x in given.items() if key not in dropped})
    build_model(config).save_pretrained(tmp_path / "folder")
    assert_same_logits(IDS, tmp_path / "folder", convert(tmp_path / "folder", tmp_path / "model.gguf"))


def save_in_blocks(tmp_path: Path, kind: str) -> tuple[Path, Path]:
    """A llama whose matrices are random blocks of a type: as a folder of fp32, and as GGUF."""
    folder = save_model(tmp_path / "folder", "llama", hidden_size=256, intermediate_size=256)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    tensors = tensors_of(config, weights)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    names = {f"blk.{i}.{own}": f"model.layers.{i}.{theirs}" for i in range(2) for own, theirs in (
        ("attn_q", "self_attn.q_proj"), ("attn_k", "self_attn.k_proj"), ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"), ("ffn_gate", "mlp.gate_proj"), ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    )} | {"token_embd": "model.embed_tokens", "output": "lm_head"}  # fmt: skip
    for seed, (own, theirs) in enumerate(names.items()):
        rows, columns = weights[f"{theirs}.weight"].shape
        stored = as_blocks(random_blocks(kind, rows, columns, seed=seed), kind)
        tensors[f"{own}.weight"], values = stored, values_of(stored)
        if (count := heads.get(own.split(".")[-1])) is not None:  # back in transformers' order
            order = permuted(torch.arange(rows)[:, None].float(), count).flatten().long().argsort()
            values = values[order]
        weights[f"{theirs}.weight"] = values
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    path = tmp_path / f"{kind}.gguf"
    path.write_bytes(pack(metadata_of(config), tensors))
    return folder, path


@pytest.mark.daily(4)
@pytest.mark.parametrize("kind", [kind for kind in GGML_TYPES if kind not in ("F32", "F16", "BF16")])
def test_blocks_of_every_type(tmp_path: Path, kind: str) -> None:
    folder, path = save_in_blocks(tmp_path, kind)
    wanted = load_fp32(folder)
    found, rounded = load_fp32(path, activations="full"), load_fp32(path)
    largest = wanted.logits(IDS).abs().max()
    assert (found.logits(IDS) - wanted.logits(IDS)).abs().max() < 1e-3 * largest
    assert (rounded.logits(IDS) - wanted.logits(IDS)).abs().max() < 0.05 * largest
    kept = found.weights.model, wanted.weights.model
    assert weight_count(kept[0]) == weight_count(kept[1])
    blocks = sum(one.end - one.begin for one in read_gguf(path).tensors.values() if not one.kind.is_float)
    assert blocks <= weight_bytes(kept[0]) < 1.1 * blocks  # the embedding, too, is in blocks
    stored, name = read_tensors(path), "model.layers.0.self_attn.q_proj.weight"
    assert isinstance(stored, GgufTensors)
    assert stored.kind(name).name == kind
    assert stored.blocks(name).shape == (256, 256 // GGML_TYPES[kind].values * GGML_TYPES[kind].nbytes)
    assert torch.equal(stored[name], read_tensors(folder)[name])


def test_activations_that_are_unknown_are_refused(folder):
    with pytest.raises(ConfigError, match="activations must be auto or full, got 'int4'"):
        prepare(folder, activations="int4")


def test_sixteen_bits(tmp_path):
    folder = save_model(tmp_path / "folder", "llama")
    for kind, dtype in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        rounded = tmp_path / kind
        shutil.copytree(folder, rounded)
        weights = load_file(folder / "model.safetensors")
        kept = {name: x.to(dtype) if x.ndim > 1 else x for name, x in weights.items()}
        save_file(kept, rounded / "model.safetensors", {"format": "pt"})
        path = convert(folder, tmp_path / f"{kind}.gguf", kind=kind)
        assert torch.equal(load_fp32(path).logits(IDS), load_fp32(rounded).logits(IDS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "folder", "llama")


def split(folder: Path, to: Path, count: int = 3) -> list[Path]:
    """A model in several files; the first has the metadata, as llama.cpp writes them."""
    whole = read_gguf(convert(folder, to / "whole.gguf"))
    stored = {
        name: Stored(one.kind.number, one.shape, one.path.read_bytes()[one.begin : one.end])
        for name, one in whole.tensors.items()
    }
    (to / "whole.gguf").unlink()
    paths = [to / f"m-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    for number, path in enumerate(paths):
        own = {name: stored[name] for name in list(stored)[number::count]}
        metadata = {"split.no": number, "split.count": count, "split.tensors.count": len(stored)}
        path.write_bytes(pack((dict(whole.metadata) if number == 0 else {}) | metadata, own))
    return paths


def test_split_files(tmp_path, folder):
    paths = split(folder, tmp_path)
    wanted = load_fp32(folder).logits(IDS)
    assert torch.equal(load_fp32(paths[2]).logits(IDS), wanted)
    assert resolve_model(tmp_path).folder == paths[0].resolve()
    assert prepare(paths[1]).stored_bytes == prepare(folder).stored_bytes
    second = paths[1].read_bytes()
    paths[1].unlink()
    with pytest.raises(ModelError, match=r"one of 3 parts, but m-00002-of-00003\.gguf is not there"):
        prepare(paths[0])
    shutil.copy(paths[2], paths[1])
    with pytest.raises(
        ModelError, match="says that it is part 2 of 3, counted from 0, and its name stands for 1"
    ):
        prepare(paths[0])
    paths[1].write_bytes(second.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"))
    with pytest.raises(ModelError, match=r"'blk.0.attn_q.weight' is in .* and again in "):
        prepare(paths[0])


def test_a_tensor_may_not_occur_twice(tmp_path, folder):
    raw = convert(folder, tmp_path / "a.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(raw.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"))
    with pytest.raises(ModelError, match=r"'blk.0.attn_q.weight' is in .*a\.gguf and again in .*a\.gguf"):
        prepare(tmp_path / "a.gguf")


def test_a_part_under_another_name(tmp_path, folder):
    renamed = split(folder, tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="part 0 of 3, counted from 0, and its name stands for 0 of 1"):
        prepare(renamed)


def test_a_folder_with_one_model(tmp_path, folder):
    path = convert(folder, tmp_path / "a.gguf")
    (tmp_path / "mmproj-a.gguf").write_bytes(b"GGUF")
    assert resolve_model(tmp_path).folder == path.resolve()
    shutil.copy(path, tmp_path / "b.gguf")
    with pytest.raises(ModelError, match=r"holds 2 models as GGUF; name one of its files: a\.gguf, b\.gguf"):
        resolve_model(tmp_path)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    assert resolve_model(tmp_path).folder == tmp_path.resolve()


def test_files_that_are_no_model(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(100))
    with pytest.raises(ModelError, match="is a file and no GGUF; name a GGUF file"):
        kvq.load(tmp_path / "a.bin")
    with pytest.raises(ModelError, match=r"there is no file models/none\.gguf"):
        kvq.load("models/none.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    with pytest.raises(ModelError, match="kvq reads no GGUF of architecture None"):
        kvq.load(tmp_path / "b.gguf")


def rewritten(folder: Path, path: Path, change: Any) -> Path:
    """The folder's model, after `change` of its metadata and tensors."""
    config = json.loads((folder / "config.json").read_text())
    metadata, tensors = metadata_of(config), tensors_of(config, load_file(folder / "model.safetensors"))
    change(metadata, tensors)
    path.write_bytes(pack(metadata, tensors))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, t: t.pop("blk.1.ffn_up.weight"), "lacks 1 tensors, first model.layers.1.mlp.up_proj"),
        (lambda m, t: t.update({"blk.0.odd.weight": VECTOR}), "tensor 'blk.0.odd.weight', for which"),
        (lambda m, t: t.update({"blk.2.attn_norm.weight": VECTOR}), "metadata says num_hidden_layers 2"),
        (lambda m, t: m.update({"llama.feed_forward_length": 96}), "metadata says intermediate_size 96, but"),
        (lambda m, t: m.update({"tokenizer.ggml.eos_token_id": 500}), "eos_token_id must be a token's id"),
        (lambda m, t: m.update({"llama.attention.head_count": 3}), "3 query heads don't divide"),
        (lambda m, t: t.update({"blk.0.attn_q.bias": Q8_0}), "vector .* is stored as Q8_0"),
    ],
)  # fmt: skip
def test_metadata_and_tensors_that_do_not_fit(tmp_path, folder, change, message):
    path = rewritten(folder, tmp_path / "a.gguf", change)
    with pytest.raises(ModelError, match=message):
        load_fp32(path)


def test_changed_files_are_read_again(tmp_path, folder):
    path = convert(folder, tmp_path / "a.gguf")
    before = prepare(path)
    rewritten(folder, path, lambda m, t: m.update({"llama.context_length": 128}))
    assert (before.max_context, prepare(path).max_context) == (256, 128)


def test_weights_round_on_load_unless_they_are_rounded(tmp_path, folder):
    path = convert(folder, tmp_path / "a.gguf")
    wanted = load_fp32(folder, weights="int8").logits(IDS)
    assert torch.equal(load_fp32(path, weights="int8").logits(IDS), wanted)
    _, blocks = save_in_blocks(tmp_path, "Q8_0")
    assert prepare(blocks).is_quantized
    with pytest.raises(ConfigError, match="holds quantized weights already"):
        prepare(blocks, weights="int8")
    with pytest.raises(ModelError, match="is a GGUF file; take the model's safetensors"):
        kvq.quantize(path, tmp_path / "out", method="rtn")


def test_digests_and_a_recipe_beside(tmp_path, folder):
    path = convert(folder, tmp_path / "a.gguf")
    model = prepare(path)
    other = rewritten(
        folder, tmp_path / "b.gguf", lambda m, t: t.update({"output.weight": t["token_embd.weight"]})
    )
    assert model.digest == prepare(path).digest != prepare(other).digest
    assert model.recipe_beside == path.resolve().with_name("a.kvq.json")
    assert find_scales(model, None) is None
    KVRecipe.uniform("int8", model.geometry.head_dims).save(model.recipe_beside)
    assert find_scales(model, None) is None  # read: it has no scales


@pytest.mark.parametrize("options", [{"backend": "reference"}, {"dtype": "bf16"}, {"dtype": "fp16"}])
def test_other_ways_to_load(tmp_path, folder, options):
    """Without kvq's own Linear layers, a skeleton is filled with what transformers' layers multiply by."""
    path = convert(folder, tmp_path / "a.gguf")
    wanted, found = (load_fp32(one, **options) for one in (folder, path))
    assert torch.equal(found.logits(IDS), wanted.logits(IDS))


@pytest.mark.skipif(not has_own_products(torch.float32, "auto"), reason="no fast products: dequantized")
def test_sensitive_layers_keep_inputs_of_16_bits(tmp_path: Path) -> None:
    _, path = save_in_blocks(tmp_path, "Q8_0")
    model = load_fp32(path).weights.model
    inputs = {
        name.rpartition(".")[2]: {fmt.inputs for fmt in module.formats}
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    full = {name for name, own in inputs.items() if own == {Inputs.FULL}}
    assert full == {"q_proj", "k_proj", "v_proj", "lm_head"}
    assert {name for name, own in inputs.items() if own == {Inputs.GROUPS}} == set(inputs) - full
