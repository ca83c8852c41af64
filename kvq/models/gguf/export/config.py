"""Metadata and tensors of a GGUF file that stand for a transformers config: the reverse of `gguf_config`.

What GGUF can't say is not looked for here: whoever writes a file reads it back and compares.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvq.errors import ModelError, nearest
from kvq.models.gguf.architectures import ARCHITECTURES, VARIANTS, Architecture
from kvq.models.gguf.config import SIZES, llama3_factor
from kvq.models.gguf.names import HEADS, ROW_OF_ONE, WHOLE

_SAME = {"mistral": "llama"}  # families that differ in what GGUF says otherwise
_UNUSED = re.compile(r".*(rotary_emb\.inv_freq|masked_bias|attn\.bias)")  # of old checkpoints
_SCALED = ("linear", "yarn")


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
    known = {own.model_type: name for name, own in ARCHITECTURES.items()}
    known |= {family: known[same] for family, same in _SAME.items()}
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
    if whole["rope_type"] in _SCALED:
        found["rope.scaling.type"] = whole["rope_type"]
        found["rope.scaling.factor"] = float(whole["factor"])
    if whole["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = whole["original_max_position_embeddings"]
        for field in ("beta_fast", "beta_slow"):
            if whole.get(field) is not None:
                found[f"rope.scaling.yarn_{field}"] = float(whole[field])
    local = rope.get("sliding_attention", whole)["rope_theta"]
    if "sliding_attention" in rope and local != own.local_theta:
        found["rope.freq_base_swa"] = float(local)
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in found.items()}


def rope_factors(config: Mapping[str, Any]) -> list[float] | None:
    """Return the values of rope_freqs.weight for Llama 3's scaling; None for other models."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") != "llama3":
        return None
    dims = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    waves = (2 * math.pi * rope["rope_theta"] ** (2 * i / dims) for i in range(dims // 2))
    origin = rope["original_max_position_embeddings"]
    return [llama3_factor(wave, rope["factor"], origin) for wave in waves]


def find_targets(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[Target]:
    """Return the tensors of the file, in its order; `shapes`: of the model's tensors, by name.

    Raises:
        ModelError: the file has no place for a tensor.
    """
    own = exported_architecture(config["model_type"])[1]
    left = {name: shape for name, shape in shapes.items() if not _UNUSED.fullmatch(name)}
    if config.get("tie_word_embeddings"):
        left.pop("lm_head.weight", None)
    places = [(f"{part}.{{}}", f"{there}.{{}}") for part, there in WHOLE.items()]
    parts = {there: part for part, there in own.parts.items()}  # of two, the one that the family adds
    places += [
        (f"blk.{layer}.{part}.{{}}", f"model.layers.{layer}.{there}.{{}}")
        for layer in range(config["num_hidden_layers"])
        for there, part in parts.items()
    ]
    found = [
        target
        for here, there in places
        for kind in ("weight", "bias")
        for target in _target(own, config, here.format(kind), there, kind, left)
    ]
    if rest := left.keys() - {name for target in found for name in target.sources}:
        raise ModelError(
            f"GGUF files of {config['model_type']} models have no place for tensor {min(rest)!r:.80}; write "
            f"compressed-tensors"
        )
    return found


def _target(
    own: Architecture, config: Mapping[str, Any], here: str, there: str, kind: str, shapes: Mapping[str, Any]
) -> Iterator[Target]:
    part = here.split(".")[-2]
    if there.count("{}") == 2:
        count = sum(one.startswith(there.partition("{}")[0]) for one in shapes)
        names = [name for i in range(count) if (name := there.format(i, kind)) in shapes]
    else:
        names = [name for name in (there.format(kind),) if name in shapes]
    if not names:
        return
    shape = shapes[names[0]]
    shape = (len(names), *shape) if "_exps." in here else shape[1:] if part == ROW_OF_ONE else shape
    yield Target(
        name=here,
        sources=tuple(names),
        shape=shape,
        heads=config[HEADS[part]] if part in HEADS and own.is_permuted else None,
        shift=own.norm_shift if part.endswith("norm") else 0.0,
    )
