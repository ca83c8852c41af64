"""GGUF files: models that come back from them as they were, and what is refused before any work."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import kvq
from kvq.calib.quantize import gguf as writing
from kvq.errors import ConfigError, ModelError
from kvq.evals import calibration_text
from kvq.formats import KVRecipe
from kvq.models.describe.resolve import EMBEDDED
from kvq.models.gguf.files import RECIPE, read_gguf
from kvq.models.loading.prepared import find_scales, prepare
from kvq.weights.manifest import manifest_path, verify_manifest
from tests.helpers_models import (
    assert_same_logits,
    build_model,
    load_fp32,
    random_tokens,
    save_model,
    small_config,
)

TIED, FULL, SLIDING = {"tie_word_embeddings": True}, "full_attention", "sliding_attention"
QWEN = {"use_sliding_window": False, "sliding_window": None, "layer_types": [FULL, FULL]}
EVERY_FOURTH = {"layer_types": [SLIDING, SLIDING, SLIDING, FULL, SLIDING]}
# As their makers' models are: what GGUF can't say is refused below
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": QWEN, "qwen3": QWEN,
    "gemma3_text": TIED | {"query_pre_attn_scalar": 24, "layer_types": [SLIDING] * 5 + [FULL, SLIDING]},
    "arcee": {}, "cohere": TIED, "cohere2": TIED | EVERY_FOURTH, "exaone4": EVERY_FOURTH, "gemma": TIED,
    "gemma2": TIED | {"query_pre_attn_scalar": 24}, "glm4": {}, "granite": {},
    "mistral": {"sliding_window": None}, "mixtral": {"sliding_window": None}, "olmo2": {},
    "olmo3": EVERY_FOURTH, "phi3": {}, "qwen3_moe": QWEN | {"norm_topk_prob": True}, "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0, 1], "num_hidden_layers": 5},
}  # fmt: skip
IDS = random_tokens(40, seed=1)
TEXT = calibration_text().text[:20_000]


def with_tokenizer(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EMBEDDED["tiny"] / name, folder / name)
    return folder


def saved(folder: Path, family: str, **changes: Any) -> Path:
    return with_tokenizer(save_model(folder, family, vocab_size=4096, **changes))


def write(model: Path, out: Path, kind: str = "F32", **options: Any) -> Path:
    kvq.quantize(model, out, file_format="gguf", gguf_type=kind, device="cpu", **options)
    return out


@pytest.mark.daily(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_folder(tmp_path: Path, family: str) -> None:
    folder = saved(tmp_path / "folder", family, **FAMILIES[family])
    assert_same_logits(IDS, folder, write(folder, tmp_path / "model.gguf"))


def test_experts_beside_a_shared_one(tmp_path):
    given = small_config("qwen3_moe").to_dict() | {"num_experts": 4, "shared_expert_intermediate_size": 48}
    dropped = ("architectures", "head_dim", "model_type", "num_local_experts", "use_sliding_window")
    config = AutoConfig.for_model("qwen2_moe", **{key: x for key, x in given.items() if key not in dropped})
    config.vocab_size = 4096
    build_model(config).save_pretrained(tmp_path / "folder")
    folder = with_tokenizer(tmp_path / "folder")
    assert_same_logits(IDS, folder, write(folder, tmp_path / "model.gguf"))


ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 64}
LLAMA3 = ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "rope",
    [
        LLAMA3 | {"original_max_position_embeddings": 1024},
        ROPE | {"rope_type": "yarn", "factor": 4.0},
        {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0},
    ],
)
def test_scaled_positions_and_biases(tmp_path, rope):
    folder = saved(tmp_path / "folder", "llama", rope_parameters=rope, attention_bias=True, mlp_bias=True)
    assert_same_logits(IDS, folder, write(folder, tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mistral", {}, r"can't say that sliding_window is 16"),
        ("gemma2", {"query_pre_attn_scalar": 10}, r"can't say that query_pre_attn_scalar is 10"),
        ("llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "rope_parameters|rope_freqs"),
        ("llama", {"hidden_act": "gelu"}, r"can't say that hidden_act is 'gelu'"),
        ("gpt_neox", {}, "kvq writes no GGUF of gpt_neox models.*it writes arcee"),
    ],
)
def test_what_gguf_can_not_say_is_refused(tmp_path, family, changes, message):
    folder = saved(tmp_path / "folder", family, **changes)
    with pytest.raises(ModelError, match=message):
        write(folder, tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_tensor_without_a_place_is_refused(tmp_path):
    folder = saved(tmp_path / "folder", "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"no place for tensor 'model.layers.0.self_attn.q_norm"):
        write(folder, tmp_path / "model.gguf")


def test_numbers_beyond_fp16_are_refused_and_nothing_is_left(tmp_path):
    folder = saved(tmp_path / "folder", "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e6
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj.* too large for F16"):
        write(folder, tmp_path / "model.gguf", "F16")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert_same_logits(IDS, folder, write(folder, tmp_path / "model.gguf", "F32"))


@pytest.mark.parametrize("kind", ["BF16", "F16", "Q8_0", "Q4_K_M", "Q6_K"])
def test_types_are_read_back(two_layers, tmp_path, kind):
    path = write(two_layers, tmp_path / "model.gguf", kind)
    wanted, found = (load_fp32(one).logits(IDS) for one in (two_layers, path))
    limit = {"BF16": 0, "F16": 1e-5, "Q8_0": 0.02, "Q6_K": 0.04, "Q4_K_M": 0.12}[kind]
    assert (found - wanted).norm() <= limit * wanted.norm()
    types = {name: tensor.kind.name for name, tensor in read_gguf(path).tensors.items()}
    assert types["blk.0.attn_norm.weight"] == "F32"
    if kind == "Q4_K_M":  # of two layers, the last has more bits, and the embedding gives logits
        assert types["blk.0.ffn_down.weight"] == types["blk.1.attn_q.weight"] == "Q4_K"
        assert types["blk.1.ffn_down.weight"] == types["token_embd.weight"] == "Q6_K"


def test_metadata_are_those_that_were_meant(two_layers, tmp_path):
    metadata = read_gguf(write(two_layers, tmp_path / "model.gguf", "Q4_K_M")).metadata
    wanted = {
        "general.architecture": "llama", "general.file_type": 15, "general.quantization_version": 2,
        "general.alignment": 32, "llama.block_count": 2, "llama.context_length": 4096,
        "llama.embedding_length": 256, "llama.feed_forward_length": 768, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.rope.dimension_count": 64, "llama.rope.freq_base": 1e4,
        "llama.vocab_size": 4096, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip
    assert {key: metadata[key] for key in wanted} == wanted
    assert RECIPE not in metadata


def test_two_runs_write_the_same_bytes(two_layers, tmp_path):
    first, second = (write(two_layers, tmp_path / name, "Q4_K_M") for name in ("a.gguf", "b.gguf"))
    assert first.read_bytes() == second.read_bytes()


def test_rows_that_blocks_do_not_divide_are_noted(tmp_path):
    folder = saved(tmp_path / "folder", "llama")  # 64 and 80 inputs
    done = kvq.quantize(folder, tmp_path / "a.gguf", file_format="gguf", device="cpu")
    assert any("Q5_0 in place of Q4_K, whose blocks don't divide 64 inputs" in note for note in done.notes)
    assert any("F16 in place of" in note and "80 inputs" in note for note in done.notes)
    assert torch.isfinite(load_fp32(tmp_path / "a.gguf").logits(IDS)).all()


def test_options_that_gguf_does_not_take_are_refused_by_name(two_layers, tmp_path):
    out, kind = tmp_path / "a.gguf", "Q4_K_M"
    for options, message in (
        ({"method": "gptq"}, "leave out --method"),
        ({"text": TEXT}, "without a text; leave out --text"),
        ({"samples": 16, "text": TEXT, "kv_scales": True}, "leave out --samples$"),
        ({"bits": 4, "symmetric": False}, "leave out --bits, --symmetric"),
        ({"dtype": "fp16"}, "leave out --dtype"),
        ({"file_format": "autoawq"}, "--type names types of GGUF files"),
    ):
        with pytest.raises(ConfigError, match=message):
            kvq.quantize(two_layers, out, **({"file_format": "gguf", "gguf_type": kind} | options))
    with pytest.raises(ConfigError, match=r"ends in \.gguf"):
        write(two_layers, tmp_path / "folder")
    out.write_bytes(b"GGUF, of someone else")
    with pytest.raises(ConfigError, match="it exists"):
        write(two_layers, out)
    for kind in ("Q8_0", "F16"):  # and the manifest of the older file is not left
        write(two_layers, out, kind, overwrite=True)
        assert verify_manifest(out)
    assert sorted(tmp_path.iterdir()) == [out, manifest_path(out)]


def test_a_stopped_run_leaves_the_older_file(two_layers, tmp_path, monkeypatch):
    out = write(two_layers, tmp_path / "a.gguf", "Q8_0")
    before = out.read_bytes()
    monkeypatch.setattr(writing, "content_digest", lambda _: 1 / 0)  # after all tensors
    with pytest.raises(ZeroDivisionError):
        write(two_layers, out, "F16", overwrite=True)
    assert (out.read_bytes(), sorted(tmp_path.iterdir())) == (before, [out, manifest_path(out)])
    assert verify_manifest(out)


def test_scales_of_k_and_v_go_with_the_file(two_layers, tmp_path):
    out = write(two_layers, tmp_path / "a.gguf", "Q8_0", kv_scales=True, text=TEXT)
    model = prepare(out, device="cpu")
    assert find_scales(model, None) == model.recipe_inside.static_scales
    assert torch.isfinite(kvq.load(out, kv="fp8_per_head", device="cpu").logits([3, 4, 5])).all()
    beside = KVRecipe.uniform("int8", model.geometry.head_dims)
    beside.save(model.recipe_beside)  # nearer than what is inside
    assert find_scales(model, None) is None
