"""Small random models that read images or sound too, saved as transformers saves them."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForMultimodalLM

from kvq.models.describe.modules import config_of
from kvq.models.observe.tiny_copy import draw, in_sections, smaller

# Of towers, whatever their family calls it.
_TOWER: dict[str, Any] = {
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1,
    "num_layers": 1, "num_attention_heads": 2, "num_heads": 2, "attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "image_size": 28, "patch_size": 14, "num_channels": 3, "vision_output_dim": 32,
    "projector_input_dim": 32, "projector_output_dim": 32, "out_hidden_size": 64,
    "fullatt_block_indexes": [0], "num_position_embeddings": 4, "deepstack_visual_indexes": [0],
    "encoder_layers": 1, "d_model": 32,
    "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "max_source_positions": 8, "num_mel_bins": 8,
    "vt_hidden_size": 32, "mm_hidden_size": 32, "text_hidden_size": 64, "hidden_dim": 32,
    "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2, "vocab_size": 16, "visual_vocab_size": 16,
    "num_visual_indicator_tokens": 1, "init_pos_emb_height": 4, "init_pos_emb_width": 4,
    "merged_hidden_size": 32,
}  # fmt: skip
_KINDS = ("full_attention", "sliding_attention")
_ROTATED = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = _ROTATED | {"mrope_section": [16, 24, 24]}
_LACKING = "transformers.models.timm_wrapper.modeling_timm_wrapper.TimmWrapperModel"  # of a package


class _Tower(nn.Module):
    """Stands for a tower that isn't installed; nothing runs it."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()
        self.projection = nn.Linear(4, 4)

    _from_config = classmethod(lambda cls, *_, **__: cls())


# What text parts are given, which their classes' defaults leave out.
TEXTS: dict[str, dict[str, Any]] = {
    "gemma4": {"num_kv_shared_layers": 18},
    "cohere_compass": {"rope_parameters": dict.fromkeys(_KINDS, _ROTATED)},
    "glm46v": {"rope_parameters": _SECTIONS | {"partial_rotary_factor": 0.5}},
    "glm_ocr": {"rope_parameters": _SECTIONS},
    "glm4v": {"rope_parameters": _SECTIONS | {"partial_rotary_factor": 0.5}},
    "glm4v_moe": {"rope_parameters": _SECTIONS | {"partial_rotary_factor": 0.5}},
    "qwen2_vl": {"rope_parameters": _SECTIONS},
    "qwen2_5_vl": {"rope_parameters": _SECTIONS},
}
_TOWERS = ("vision_config", "audio_config", "perceiver_config")


def save_whole(folder: Path, model_type: str, **text: Any) -> Any:
    """Save a small one with the given fields of its text part; returns it, with eager attention."""
    config = AutoConfig.for_model(model_type)
    given = config.to_dict()
    text = TEXTS.get(model_type, {}) | text
    part = type(config.text_config).from_dict(config.text_config.to_dict() | text)
    given["text_config"] = in_sections(next(iter(smaller(part))))
    given["text_config"]["eos_token_id"] = 2
    for name in _TOWERS:
        if isinstance(tower := given.get(name), dict):
            given[name] = tower | {key: value for key, value in _TOWER.items() if key in tower}
    for name, value in given.items():
        if name.endswith(("token_id", "token_index")) and isinstance(value, int):
            given[name] = 0  # which no text of tests holds
    given |= {name: 64 for name in ("hidden_size", "mm_hidden_size") if name in given}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with patch(_LACKING, _Tower):
            model = AutoModelForMultimodalLM.from_config(
                config_of(given), dtype=torch.float32, attn_implementation="eager"
            ).eval()
        draw(model)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # which names the large one's tokens
    return model
