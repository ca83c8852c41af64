"""Support check for a config.json: refuses models whose results would be wrong, not merely slow."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvq.errors import nearest
from kvq.geometry.families import FAMILIES

# RoPE types with frequencies that depend on the longest position in the batch.
BATCH_DEPENDENT_ROPE = ("longrope", "dynamic")
# RoPE types of the families in FAMILIES.
ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional", *BATCH_DEPENDENT_ROPE)
# Families whose models are encoders, unless is_decoder says otherwise
_ENCODERS = (
    *("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "albert", "mpnet"),
    *("modernbert", "nomic_bert", "deberta", "deberta-v2"),
)
# Well-known families that kvq refuses, and why.
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
    """Return the RoPE types named in a config, including those for individual layer types."""
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
    """Return True if a field describes a model; DBRX's attention and expert fields only look like models."""
    return isinstance(part, Mapping) and "model_type" in part and name not in ("attn_config", "ffn_config")


def why_refused(config: Mapping[str, Any], *, max_context: int | None) -> str | None:
    """Return the reason why kvq can't run the model in a config.json's dict, or None if it may run."""
    model_type = str(config.get("model_type", ""))
    if config.get("auto_map"):
        return "it has auto_map, code that would run at load; kvq never runs it"
    if config.get("is_encoder_decoder"):
        return "it has an encoder and cross-attention; kvq runs decoders"
    if model_type in _ENCODERS and not config.get("is_decoder"):
        return "it is an encoder, whose tokens attend to later ones; kvq runs decoders, also as embedders"
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
    both_ways = config.get("use_bidirectional_attention")  # "vision": within images only
    if (both_ways and both_ways != "vision") or config.get("is_causal") is False:
        return "its attention is not causal"
    for rope in rope_types(config):
        if rope not in ROPE_TYPES and model_type in FAMILIES:
            near = nearest(rope, ROPE_TYPES) or ";"
            return f"rope_type {rope!r} is none that transformers knows{near} known: {', '.join(ROPE_TYPES)}"
        if rope in BATCH_DEPENDENT_ROPE and max_context is None:
            return (
                f"{rope} RoPE changes a token's frequencies with its batch neighbours; pin them with "
                f"--max-model-len N (load(max_context=N)), the longest context you will use"
            )
    return None


# Text parts of multimodal models. Only those in text_parts.json are served: the logits of each on text were
# compared with those of transformers' whole model.
_PART = "text_config"
# Keys of a whole model's config that also apply to its text part, if that lacks them.
_COMMON = (
    *("auto_map", "is_encoder_decoder", "quantization_config", "dtype", "torch_dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
_TIED = "tie_word_embeddings"
_HEAD = re.compile(r"^(?:model\.)?(?:language_model\.)?lm_head\.")
_BODY = re.compile(
    r"^(?:(?:model\.)?(?:language_model|text_model)\.(?:model\.)?|model\.(?=(?:embed_tokens|layers|norm)\.))"
)


@dataclass(frozen=True, slots=True)
class _TextPart:
    """Text part of a multimodal model. `is_tied`: whether the embedding serves as the head unless the config
    says otherwise. `fixed`: fields of the text part that override the config."""

    model_type: str  # of the text part, if the config doesn't state it
    is_tied: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)


# D196: these text models were compared with the whole models
_PARTS = json.loads(Path(__file__).with_name("text_parts.json").read_text(encoding="utf-8"))
KINDS = {kind: _TextPart(**part) for kind, part in _PARTS.items()}


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the text part of a multimodal model's config.json as a dict, or None for other models."""
    kind = KINDS.get(str(config.get("model_type")))
    if kind is None:
        return None
    part = config.get(_PART)
    if isinstance(part, Mapping):
        own = {"model_type": kind.model_type, **part}
    else:  # as in early configs of Qwen2-VL
        own = {name: value for name, value in config.items() if not name.endswith("_config")}
        own |= {"model_type": kind.model_type}
    for name in _COMMON:
        if name in config:
            own.setdefault(name, config[name])
    own[_TIED] = bool(config.get(_TIED, kind.is_tied)) or own.get(_TIED) is True
    own.pop("architectures", None)
    return {**own, **kind.fixed}


def text_name(name: str) -> str | None:
    """Return the text model's name for a tensor of the full model, or None if it isn't in the text part."""
    if match := _HEAD.match(name):
        return f"lm_head.{name[match.end() :]}"
    match = _BODY.match(name)
    return None if match is None else f"model.{name[match.end() :]}"
