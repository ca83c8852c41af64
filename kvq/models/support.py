"""Which models kvq runs, and why it refuses others, decided from config.json and transformers' code alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq.errors import ConfigError, ModelError
from kvq.geometry import FAMILIES, ModelGeometry, parse_geometry
from kvq.models.observed import observed_geometry
from kvq.models.rope import BATCH_DEPENDENT_ROPE, rope_types
from kvq.models.text_part import KINDS

# Families that people will try and that would be wrong, not merely slow.
_REFUSED = {
    "bloom": "its attention adds ALiBi biases and never calls the registered attention function",
    "mpt": "its attention adds ALiBi biases and never calls the registered attention function",
    "falcon": "its attention may add ALiBi biases and is its own",
    "gemma4_assistant": "it drafts for another model, whose K and V it reads",
    "gemma4_unified_assistant": "it drafts for another model, whose K and V it reads",
    "mamba": "it has no KV cache",
    "mamba2": "it has no KV cache",
}


def is_listed(geometry: ModelGeometry) -> bool:
    """Whether a model's family is among those that were checked; others have to be proven."""
    return geometry.model_type in FAMILIES


def _is_model(name: str, part: object) -> bool:
    """Whether a field describes a model; DBRX's attention and experts are described alike."""
    return isinstance(part, Mapping) and "model_type" in part and name not in ("attn_config", "ffn_config")


def check_supported(config: Mapping[str, Any], *, max_context: int | None, folder: Path) -> ModelGeometry:
    """Return the geometry of a config.json's dict if kvq may run the model rightly; `folder`: where it lies.

    Raises:
        ModelError: the model is refused; the message names it and says why.
    """
    model_type = str(config.get("model_type", ""))

    def refuse(why: str) -> ModelError:
        return ModelError(f"kvq does not run {model_type or 'this model'}: {why} (by its config.json)")

    if config.get("auto_map"):
        raise refuse("it has auto_map, code that would run at load; kvq never runs it")
    if config.get("is_encoder_decoder"):
        raise refuse("it has an encoder and cross-attention; kvq runs decoders")
    if model_type in _REFUSED:
        raise refuse(_REFUSED[model_type])
    if parts := [name for name, part in config.items() if _is_model(name, part)]:
        raise refuse(
            f"it is made of several models ({', '.join(sorted(parts))}) and is none of the {len(KINDS)} "
            f"kinds of such whose text kvq serves (docs/models.md)"
        )
    if config.get("alibi") or config.get("position_embedding_type") == "alibi":
        raise refuse("its attention adds ALiBi biases")
    if config.get("reorder_and_upcast_attn"):
        raise refuse("reorder_and_upcast_attn bypasses the registered attention function")
    both_ways = config.get("use_bidirectional_attention")  # "vision": of images only
    if (both_ways and both_ways != "vision") or config.get("is_causal") is False:
        raise refuse("its attention is not causal")
    for rope in rope_types(config):
        if rope in BATCH_DEPENDENT_ROPE and max_context is None:
            raise refuse(
                f"{rope} RoPE changes a token's frequencies with its batch neighbours; pin them with "
                f"--max-model-len N (load(max_context=N)), the longest context you will use"
            )
    if model_type not in FAMILIES:
        return observed_geometry(config, folder)
    try:
        return parse_geometry(config)
    except ConfigError as error:
        raise refuse(str(error)) from error
