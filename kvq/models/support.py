"""Which models kvq runs, and why it refuses the others, decided from config.json alone."""

from collections.abc import Mapping
from typing import Any

from kvq.errors import ConfigError, ModelError
from kvq.geometry import FAMILIES, ModelGeometry, parse_geometry

# Families that people will try and that would be wrong, not merely slow.
_REFUSED = {
    "bloom": "its attention adds ALiBi biases and never calls the registered attention function",
    "mpt": "its attention adds ALiBi biases and never calls the registered attention function",
    "falcon": "its attention may add ALiBi biases and is its own",
    "llama4": "its chunked attention lives only in its mask, which kvq does not build",
    "llama4_text": "its chunked attention lives only in its mask, which kvq does not build",
    "gemma3": "it reads images too; kvq runs the text-only form (gemma3_text)",
    "gemma3n": "its layers share K and V with each other",
    "gemma3n_text": "its layers share K and V with each other",
    "mamba": "it has no KV cache",
    "mamba2": "it has no KV cache",
    "qwen3_next": "most of its layers are linear attention, which has no KV cache",
}
# RoPE types whose frequencies depend on the longest position in the batch.
BATCH_DEPENDENT_ROPE = ("longrope", "dynamic")


def check_supported(config: Mapping[str, Any], *, max_context: int | None) -> ModelGeometry:
    """Return the geometry of a config.json's dict if kvq can run the model rightly.

    Raises:
        ModelError: the model is refused; the message names it and says why.
    """
    model_type = str(config.get("model_type", ""))

    def refuse(why: str) -> ModelError:
        return ModelError(f"kvq does not run {model_type or 'this model'}: {why}")

    if config.get("auto_map"):
        raise refuse("its config.json has auto_map, code that would run at load; kvq never runs it")
    if config.get("is_encoder_decoder"):
        raise refuse("it has an encoder and cross-attention; kvq runs decoders")
    if model_type in _REFUSED:
        raise refuse(_REFUSED[model_type])
    if model_type not in FAMILIES:
        raise refuse(f"it is not among the families that were checked: {', '.join(FAMILIES)}")
    if config.get("alibi") or config.get("position_embedding_type") == "alibi":
        raise refuse("its attention adds ALiBi biases")
    if config.get("reorder_and_upcast_attn"):
        raise refuse("reorder_and_upcast_attn bypasses the registered attention function")
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        raise refuse("its attention is not causal")
    for rope in rope_types(config):
        if rope in BATCH_DEPENDENT_ROPE and max_context is None:
            raise refuse(
                f"{rope} RoPE changes a token's frequencies with its batch neighbours; pin them with "
                f"--max-model-len N (load(max_context=N)), the longest context you will use"
            )
    try:
        return parse_geometry(config)
    except ConfigError as error:
        raise refuse(str(error)) from error


def rope_types(config: Mapping[str, Any]) -> set[str]:
    """The RoPE types named in a config, for all layer types."""
    found = set()
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if isinstance(value, Mapping):
            for part in (value, *(x for x in value.values() if isinstance(x, Mapping))):
                name = part.get("rope_type", part.get("type"))
                if name is not None:
                    found.add("longrope" if name == "su" else str(name))
    return found
