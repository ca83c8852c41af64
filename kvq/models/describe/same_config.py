"""Comparison of what transformers reads from two configs: whether they describe one computation."""

import re
import struct
from typing import Any

from kvq.errors import ModelError
from kvq.formats.checkpoints.fields import shown
from kvq.models.describe.modules import default_config

# Fields that change no logits, or that other fields repeat
_IDLE = re.compile(
    r"_.*|.*_token_id|.*dropout.*|dtype|architectures|model_type|transformers_version|initializer_.*|use_cache|"
    r"pretraining_tp|router_(aux_loss_coef|jitter_noise)|output_router_logits|max_window_layers|"
    r"use_sliding_window|cache_implementation|sliding_window_pattern"
)


def check_same_config(wanted: Any, found: Any, where: str) -> None:  # D387
    """Raise ModelError unless two of transformers' configs agree; `where`: what can't say the first."""
    from transformers import PreTrainedConfig

    before, after = wanted.to_dict(), found.to_dict()
    before["head_dim"] = before.get("head_dim") or wanted.hidden_size // wanted.num_attention_heads
    own = default_config(before).to_dict().keys() | after.keys()
    own -= PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
    for name in sorted(one for one in own if not _IDLE.fullmatch(one)):
        if _plain(before.get(name)) != _plain(after.get(name)):
            raise ModelError(
                f"{where} can't say that {name} is {shown(before.get(name))}; kvq would read "
                f"{shown(after.get(name))} from it"
            )


def _plain(value: Any) -> Any:
    """Return a value without what is neutral, with numbers in fp32."""
    if isinstance(value, dict):
        parts = {name: _plain(one) for name, one in value.items()}
        return {
            name: one for name, one in parts.items() if one and (name, one) != ("partial_rotary_factor", 1)
        }
    if isinstance(value, float):
        return struct.unpack("<f", struct.pack("<f", value))[0]
    return value or None
