"""Pinning RoPE frequencies that would otherwise depend on a token's batch neighbours."""

from typing import Any

from kvq.errors import ModelError
from kvq.models.support import BATCH_DEPENDENT_ROPE


def pin_rope(model: Any, max_context: int) -> None:
    """Fix the frequencies of every longrope or dynamic RoPE module as for `max_context` tokens.

    From then on each token is rotated the same in any batch: longrope takes its short factors if
    `max_context` is within the original training length, else its long ones, for all positions.

    Raises:
        ModelError: a batch-dependent RoPE of a form that can't be pinned.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            if any(part in BATCH_DEPENDENT_ROPE for part in kind.values()):
                raise ModelError(
                    f"kvq does not run {model.config.model_type} with {sorted(set(kind.values()))} RoPE "
                    f"per layer type: its frequencies change with batch neighbours and can't be pinned"
                )
        elif kind in BATCH_DEPENDENT_ROPE:
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
                module.config, module.inv_freq.device, seq_len=max_context
            )
            module.inv_freq.data = frequencies.to(module.inv_freq.dtype)
            module.attention_scaling = scaling
            module.rope_type = f"pinned at {max_context} tokens"
