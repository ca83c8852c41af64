"""Support check of a config.json: refuses models whose results would be wrong, not merely slow."""

from collections.abc import Mapping
from typing import Any

from kvq.errors import nearest
from kvq.geometry.families import FAMILIES
from kvq.geometry.text_part import KINDS

# Types with frequencies that depend on the longest position in the batch.
BATCH_DEPENDENT_ROPE = ("longrope", "dynamic")
# Types of listed families.
ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional", *BATCH_DEPENDENT_ROPE)
# Families that people will try.
_REFUSED = {
    "bloom": "its attention adds ALiBi biases and never calls the registered attention function",
    "mpt": "its attention adds ALiBi biases and never calls the registered attention function",
    "falcon": "its attention is its own code and may add ALiBi biases",
    "gemma4_assistant": "it drafts for another model, whose K and V it reads",
    "gemma4_unified_assistant": "it drafts for another model, whose K and V it reads",
    "mamba": "it has no KV cache",
    "mamba2": "it has no KV cache",
}


def rope_types(config: Mapping[str, Any]) -> set[str]:
    """Return the RoPE types named in a config, for all layer types."""
    found = set()
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if isinstance(value, Mapping):
            for part in (value, *(x for x in value.values() if isinstance(x, Mapping))):
                name = part.get("rope_type", part.get("type"))
                if name is not None:
                    found.add("longrope" if name == "su" else str(name))
    return found


def _is_model(name: str, part: object) -> bool:
    """True if a field describes a model; DBRX describes its attention and experts in the same way."""
    return isinstance(part, Mapping) and "model_type" in part and name not in ("attn_config", "ffn_config")


def why_refused(config: Mapping[str, Any], *, max_context: int | None) -> str | None:
    """Return why kvq does not run the model of a config.json's dict, or None if it may run."""
    model_type = str(config.get("model_type", ""))
    if config.get("auto_map"):
        return "it has auto_map, code that would run at load; kvq never runs it"
    if config.get("is_encoder_decoder"):
        return "it has an encoder and cross-attention; kvq runs decoders"
    if model_type in _REFUSED:
        return _REFUSED[model_type]
    if parts := [name for name, part in config.items() if _is_model(name, part)]:
        return (
            f"it consists of several models ({', '.join(sorted(parts))}) and is not among the {len(KINDS)} "
            f"kinds whose text kvq serves (docs/models.md)"
        )
    if config.get("alibi") or config.get("position_embedding_type") == "alibi":
        return "its attention adds ALiBi biases"
    if config.get("reorder_and_upcast_attn"):
        return "reorder_and_upcast_attn bypasses the registered attention function"
    both_ways = config.get("use_bidirectional_attention")  # "vision": of images only
    if (both_ways and both_ways != "vision") or config.get("is_causal") is False:
        return "its attention is not causal"
    for rope in rope_types(config):
        if rope not in ROPE_TYPES and model_type in FAMILIES:
            near = nearest(rope, list(ROPE_TYPES)) or ";"
            return f"rope_type {rope!r} is none that transformers knows{near} known: {', '.join(ROPE_TYPES)}"
        if rope in BATCH_DEPENDENT_ROPE and max_context is None:
            return (
                f"{rope} RoPE changes a token's frequencies with its batch neighbours; pin them with "
                f"--max-model-len N (load(max_context=N)), the longest context you will use"
            )
    return None
