"""Metadata and tensors of a GGUF file that stand for a transformers config: the reverse of `gguf_config`.

What GGUF can't say is not looked for here: whoever writes a file reads it back and compares.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvq.errors import ModelError, nearest
from kvq.models.gguf.architectures import ARCHITECTURES, VARIANTS, Architecture
from kvq.models.gguf.config import ROPE_TENSORS, SIZES, llama3_factor
from kvq.models.gguf.names import HEADS, ROW_OF_ONE, WHOLE

_UNUSED = re.compile(r".*(rotary_emb\.inv_freq|masked_bias|attn\.bias)")  # of old checkpoints


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A tensor of GGUF: the transformers tensors that are in it, one or one for each expert."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    heads: int | None = None  # halves of each of so many heads' rows are interleaved
    shift: float = 0.0  # added to the values


def exported_architecture(model_type: str) -> tuple[str, Architecture]:
    """Return the `general.architecture` of a family, and what kvq knows of it.

    Raises:
        ModelError: kvq knows none for this family.
    """
    known = {own.model_type: name for name, own in ARCHITECTURES.items()} | {"mistral": "llama"}
    if model_type not in known:
        hint = nearest(model_type, [*known]) or ";"
        raise ModelError(
            f"kvq writes no GGUF of {model_type} models{hint} it writes {', '.join(sorted(known))}; "
            f"write compressed-tensors, or convert the model with llama.cpp's convert_hf_to_gguf.py"
        )
    name = known[model_type]
    return VARIANTS.get(name, name), ARCHITECTURES[name]


def config_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata for a transformers config, given as the dict of its attributes."""
    name, own = exported_architecture(config["model_type"])
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    rope = config["rope_parameters"]
    whole = rope.get("full_attention", rope)
    found = {key: config[field] for key, field in SIZES.items()} | {
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": int(head_dim * whole.get("partial_rotary_factor", 1)),
        "rope.freq_base": float(whole["rope_theta"]),
    }
    for key, field in own.keys.items():
        if (value := config.get(field)) is not None:
            found[key] = value if key.endswith(("count", "length")) else float(value)
    if own.has_windows and config.get("sliding_window"):
        found["attention.sliding_window"] = config["sliding_window"]
    if whole["rope_type"] in ("linear", "yarn"):
        found["rope.scaling.type"] = whole["rope_type"]
        found["rope.scaling.factor"] = float(whole["factor"])
    if whole["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = whole["original_max_position_embeddings"]
        for field in ("beta_fast", "beta_slow"):
            if whole.get(field) is not None:
                found[f"rope.scaling.yarn_{field}"] = float(whole[field])
    if (sliding := rope.get("sliding_attention")) and sliding["rope_theta"] != own.local_theta:
        found["rope.freq_base_swa"] = float(sliding["rope_theta"])
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in found.items()}


def rope_factors(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensor for Llama 3's scaling by name, fp32 [head_dim / 2]; nothing for other models."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") != "llama3":
        return {}
    dims = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    waves = (2 * math.pi * rope["rope_theta"] ** (2 * i / dims) for i in range(dims // 2))
    origin = rope["original_max_position_embeddings"]
    return {ROPE_TENSORS[0]: torch.tensor([llama3_factor(wave, rope["factor"], origin) for wave in waves])}


def find_targets(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[Target]:
    """Return the tensors of the file, in its order; `shapes`: of the model's tensors, by name.

    Raises:
        ModelError: the file has no place for a tensor.
    """
    own = exported_architecture(config["model_type"])[1]
    left = {name: shape for name, shape in shapes.items() if not _UNUSED.fullmatch(name)}
    if config.get("tie_word_embeddings"):
        left.pop("lm_head.weight", None)
    places = [*WHOLE.items()]
    parts = {there: part for part, there in own.parts.items()}  # of two, the one that the family adds
    places += [
        (f"blk.{layer}.{part}", f"model.layers.{layer}.{there}")
        for layer in range(config["num_hidden_layers"])
        for there, part in parts.items()
    ]
    found, experts = [], range(config.get(own.keys.get("expert_count", ""), 1))
    for (here, there), kind in product(places, ("weight", "bias")):
        part = here.split(".")[-1]
        names = dict.fromkeys(f"{there.format(i)}.{kind}" for i in experts)
        sources = tuple(name for name in names if name in left)
        if not sources:
            continue
        shape = left[sources[0]]
        if "{}" in there:
            shape = (len(sources), *shape)
        found.append(
            Target(
                name=f"{here}.{kind}",
                sources=sources,
                shape=shape[1:] if part == ROW_OF_ONE else shape,
                heads=config[HEADS[part]] if part in HEADS and own.is_permuted else None,
                shift=own.norm_shift if part.endswith("norm") else 0.0,
            )
        )
    if rest := left.keys() - {name for target in found for name in target.sources}:
        raise ModelError(
            f"GGUF files of {config['model_type']} models have no place for tensor {min(rest)!r:.80}; write "
            f"compressed-tensors"
        )
    return found
