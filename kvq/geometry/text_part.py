"""Models that read images or sound too: what of their config.json and tensors is the language part.

Which are served is a list: each was compared, on text, with the logits of transformers' whole model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_PART = "text_config"
# What a whole model's config says of its text part too, if that doesn't.
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
class TextPart:
    """A kind of whole model. `is_tied`: whether the embedding serves for the head, unless the config says.
    `fixed`: what its text part is made with, whatever the config says.
    """

    model_type: str  # of the text part, where the config doesn't say
    is_tied: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)


_UNSCALED = {"logit_scale": 1.0}  # whole models leave it out
KINDS: dict[str, TextPart] = {
    "aria": TextPart("aria_text"),
    "aya_vision": TextPart("cohere2", is_tied=True, fixed=_UNSCALED),
    "cohere2_vision": TextPart("cohere2", is_tied=True, fixed=_UNSCALED),
    "cohere_compass": TextPart("cohere_compass_text"),
    "deepseek_vl": TextPart("llama", is_tied=True),
    "exaone4_5": TextPart("exaone4"),
    "fuyu": TextPart("persimmon"),
    "gemma3": TextPart("gemma3_text", is_tied=True),
    "gemma3n": TextPart("gemma3n_text", is_tied=True),
    "gemma4": TextPart("gemma4_text", is_tied=True),
    "gemma4_unified": TextPart("gemma4_unified_text", is_tied=True),
    "glm46v": TextPart("glm4v_text"),
    "glm4v": TextPart("glm4v_text"),
    "glm4v_moe": TextPart("glm4v_moe_text"),
    "glm_ocr": TextPart("glm_ocr_text"),
    "glmasr": TextPart("llama", is_tied=True),
    "got_ocr2": TextPart("qwen2", is_tied=True),
    "hyperclovax_vision_v2": TextPart("hyperclovax", is_tied=True),
    "idefics2": TextPart("mistral"),
    "idefics3": TextPart("llama"),
    "internvl": TextPart("qwen2", is_tied=True),
    "janus": TextPart("llama", is_tied=True),
    "lfm2_vl": TextPart("lfm2", is_tied=True),
    "lighton_ocr": TextPart("qwen3", is_tied=True),
    "llama4": TextPart("llama4_text"),
    "llava": TextPart("llama"),
    "llava_next": TextPart("llama"),
    "llava_next_video": TextPart("llama"),
    "llava_onevision": TextPart("qwen2"),
    "minicpmv4_6": TextPart("qwen3_5_text"),
    "mistral3": TextPart("mistral", is_tied=True),
    "nemotron_h_omni": TextPart("nemotron_h"),
    "ovis2": TextPart("qwen2", is_tied=True),
    "qwen2_5_vl": TextPart("qwen2_5_vl_text"),
    "qwen2_audio": TextPart("qwen2"),
    "qwen2_vl": TextPart("qwen2_vl_text"),
    "qwen3_5": TextPart("qwen3_5_text"),
    "qwen3_5_moe": TextPart("qwen3_5_moe_text"),
    "qwen3_asr": TextPart("qwen3", is_tied=True),
    "qwen3_vl": TextPart("qwen3_vl_text"),
    "qwen3_vl_moe": TextPart("qwen3_vl_moe_text"),
    "smolvlm": TextPart("llama"),
    "video_llama_3": TextPart("qwen2"),
    "video_llava": TextPart("llama"),
    "vipllava": TextPart("llama"),
    "voxtral": TextPart("llama"),
}


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """A config.json's dict of the text part of a whole model's; None of any other model."""
    kind = KINDS.get(str(config.get("model_type")))
    if kind is None:
        return None
    part = config.get(_PART)
    if isinstance(part, Mapping):
        own = {"model_type": kind.model_type, **part}
    else:  # as Qwen2-VL's were
        own = {name: value for name, value in config.items() if not name.endswith("_config")}
        own |= {"model_type": kind.model_type}
    for name in _COMMON:
        if name in config:
            own.setdefault(name, config[name])
    own[_TIED] = bool(config.get(_TIED, kind.is_tied)) or own.get(_TIED) is True
    own.pop("architectures", None)
    return {**own, **kind.fixed}


def text_name(name: str) -> str | None:
    """What the text model calls a tensor of the whole one; None of other parts' tensors."""
    if match := _HEAD.match(name):
        return f"lm_head.{name[match.end() :]}"
    match = _BODY.match(name)
    return None if match is None else f"model.{name[match.end() :]}"
