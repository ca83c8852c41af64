"""The attention function that kvq registers with transformers as `attn_implementation="kvq"`.

No mask function is registered beside it: without one transformers builds no mask, with one a
packed-sequence check would synchronize the device every step.
"""

from typing import Any

from torch import Tensor, nn

from kvq.errors import ModelError
from kvq.models.step import PackedStep

NAME = "kvq"


def register_attention() -> None:
    """Make `attn_implementation="kvq"` known to transformers; doing it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, kvq_attention)


def kvq_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    kvq_step: PackedStep | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend over kvq's blocks: query, key, value [1, heads, tokens, dim] -> [1, tokens, heads, dim].

    Raises:
        ModelError: called outside a kvq session, or with numbers that the config did not name.
    """
    if kvq_step is None:
        raise ModelError('attn_implementation="kvq" works inside the sessions of kvq.load only')
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelError(f"{type(module).__name__} has no layer_idx; kvq can't tell its layer")
    claims: dict[str, object] = {
        "kv_heads": key.shape[1],
        "k_head_dim": key.shape[3],
        "v_head_dim": value.shape[3],
        "softcap": softcap,
        "has_sinks": s_aux is not None,
    }
    if "sliding_window" in options:
        claims["window"] = options["sliding_window"] or None
    kvq_step.check_agrees(layer, **claims)
    out = kvq_step.attend(
        layer,
        query[0].transpose(0, 1),  # [tokens, q_heads, k_head_dim]
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None
