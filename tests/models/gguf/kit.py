"""GGUF files for tests: a writer of a few lines, and what llama.cpp's converter makes of small models."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvq.formats.ggml import GGML_TYPES
from kvq.kernels.codec.ggml import dequantize

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SCALES = {  # bytes of a block at which its fp16 scale and minimum lie
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "MXFP4": (),
}  # fmt: skip
_PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
}  # fmt: skip
_EXPERT = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ARCHITECTURES = {
    "cohere": "command-r", "gemma3_text": "gemma3", "mixtral": "llama", "olmo3": "olmo2",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
}  # fmt: skip
_PERMUTED = ("arcee", "granite", "llama", "mixtral", "smollm3")
_NORM_AFTER = (
    "exaone4",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "olmo3",
    "seed_oss",
)  # "post" means after attention
_KEYS = {  # of what the config may say beside the sizes
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_eps": "attention.layer_norm_epsilon",
    "head_dim": "attention.key_length", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale", "logit_scale": "logit_scale", "num_experts_per_tok": "expert_used_count",
    "num_experts": "expert_count", "num_local_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor as a file holds it; `shape` as torch writes it."""

    kind: int  # number of the type
    shape: tuple[int, ...]
    data: bytes


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> tuple[int, bytes]:
    """The type's number and the bytes of a value of metadata."""
    if isinstance(value, bool):
        return 7, struct.pack("<B", value)
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str | bytes):
        return 8, text(value)
    parts = [typed(one) for one in value]
    return 9, struct.pack("<IQ", parts[0][0] if parts else 4, len(parts)) + b"".join(raw for _, raw in parts)


def pack(metadata: Mapping[str, Any], tensors: Mapping[str, Stored], *, version: int = 3) -> bytes:
    """The bytes of a GGUF file."""
    alignment = metadata.get("general.alignment", 32)
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, raw = typed(value)
        head += text(key) + struct.pack("<I", kind) + raw
    data = b""
    for name, one in tensors.items():
        data += bytes(-len(data) % alignment)
        dims = one.shape[::-1]
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, one.kind, len(data))
        data += one.data
    return head + bytes(-len(head) % alignment) + data


def random_blocks(kind: str, rows: int, columns: int, *, seed: int = 0) -> Tensor:
    """Rows of blocks whose values are of the size of weights: uint8 [rows, row_bytes]."""
    own, generator = GGML_TYPES[kind], torch.Generator().manual_seed(seed)
    count = rows * columns // own.values
    blocks = torch.randint(0, 256, (count, own.nbytes), dtype=torch.uint8, generator=generator)
    for at in _SCALES[kind]:
        largest = 128 if kind == "IQ4_NL" else 1 << own.bits  # numbers that codes stand for
        scale = 0.3 / largest / (30 if kind.endswith("K") else 1)
        blocks[:, at : at + 2] = (torch.rand(count, 1, generator=generator) * scale).half().view(torch.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 122
    return blocks.view(rows, -1)


def as_floats(values: Tensor, kind: str = "F32") -> Stored:
    raw = values.to(_FLOATS[kind]).contiguous().view(torch.uint8)
    return Stored(GGML_TYPES[kind].number, tuple(values.shape), raw.numpy().tobytes())


def as_blocks(blocks: Tensor, kind: str) -> Stored:
    own = GGML_TYPES[kind]
    shape = blocks.shape[0], blocks.shape[1] // own.nbytes * own.values
    return Stored(own.number, shape, blocks.numpy().tobytes())


def permuted(values: Tensor, heads: int) -> Tensor:
    """Rows of q or k in the order that llama.cpp's rotary embedding takes."""
    return values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that llama.cpp's converter would write, without a tokenizer."""
    family = str(config["model_type"])
    name = _ARCHITECTURES.get(family, family)
    own: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"] or config["num_attention_heads"],
    }
    own |= {key: config[field] for field, key in _KEYS.items() if config.get(field) is not None}
    rope = config["rope_parameters"]
    whole = rope.get("full_attention", rope)
    own["rope.freq_base"] = float(whole["rope_theta"])
    if whole["rope_type"] in ("linear", "yarn"):
        own |= {"rope.scaling.type": whole["rope_type"], "rope.scaling.factor": float(whole["factor"])}
    if whole["rope_type"] == "yarn":
        own["rope.scaling.original_context_length"] = whole["original_max_position_embeddings"]
    if "partial_rotary_factor" in rope:
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        own["rope.dimension_count"] = int(dim * rope["partial_rotary_factor"])
    if config.get("sliding_window") and family not in ("mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
        own["attention.sliding_window"] = config["sliding_window"]
        if config.get("layer_types") and family not in ("gemma2", "cohere2"):
            own["attention.sliding_window_pattern"] = [x.startswith("sliding") for x in config["layer_types"]]
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in own.items()}


def tensors_of(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], kind: str = "F32"
) -> dict[str, Stored]:
    """The tensors that llama.cpp's converter would write: matrices in `kind`, the rest in F32."""
    family, found, stacks = config["model_type"], {}, {}
    for name, values in weights.items():
        place, _, last = name.rpartition(".")
        if place.startswith("model.layers."):
            layer, part = place.removeprefix("model.layers.").split(".", 1)
            if ".experts." in part:
                expert, own = part.split(".")[-2:]
                stacks.setdefault(f"blk.{layer}.ffn_{_EXPERT[own]}_exps.weight", {})[int(expert)] = values
                continue
            own = _PARTS[part]
            if family in _NORM_AFTER and part == "post_attention_layernorm":
                own = "post_attention_norm"
            if family in _PERMUTED and own in ("attn_q", "attn_k"):
                key = "num_attention_heads" if own == "attn_q" else "num_key_value_heads"
                values = permuted(values, config[key])
            own = f"blk.{layer}.{own}"
        else:
            own = _WHOLE[place]
        if family.startswith("gemma") and own.endswith("norm"):
            values = values + 1
        values = values[0] if own.endswith("inp_shexp") else values
        found[f"{own}.{last}"] = as_floats(values, kind if values.ndim > 1 else "F32")
    for own, experts in stacks.items():
        found[own] = as_floats(torch.stack([experts[i] for i in range(len(experts))]), kind)
    return found


def convert(folder: Path, path: Path, *, kind: str = "F32", has_tokenizer: bool = False) -> Path:
    """Write a folder's model as one GGUF file."""
    config = json.loads((folder / "config.json").read_text())
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    metadata = metadata_of(config) | (tokenizer_metadata(folder) if has_tokenizer else {})
    path.write_bytes(pack(metadata, tensors_of(config, weights, kind)))
    return path


def values_of(stored: Stored) -> Tensor:
    """The values of a matrix in blocks."""
    own = next(kind for kind in GGML_TYPES.values() if kind.number == stored.kind)
    raw = torch.frombuffer(bytearray(stored.data), dtype=torch.uint8)
    return dequantize(raw.view(stored.shape[0], -1), own)


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """The metadata of a byte-level tokenizer that splits as GPT-2's does."""
    tree = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(tree["model"]["vocab"], key=tree["model"]["vocab"].__getitem__)
    special = {one["content"]: one["id"] for one in tree["added_tokens"]}
    merges = [one if isinstance(one, str) else " ".join(one) for one in tree["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": special["<|endoftext|>"],
        "tokenizer.ggml.bos_token_id": special["<|endoftext|>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }
