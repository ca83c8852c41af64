"""Attention functions that kvq registers with transformers.

`attn_implementation="kvq"` attends over the blocks of a `KvqCache`. Its mask function passes the 2-D padding
mask through without expanding it. `"kvq_packed"` is for kvq's own sessions, which pass their step as a
keyword. The latter has no mask function, since transformers would then search for packed sequences and
synchronize the device in every step.
"""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn

from kvq.cache.stores.expansion import LatentExpansion
from kvq.errors import ConfigError, ModelError
from kvq.geometry import ModelGeometry
from kvq.kernels import AttentionOptions

NAME = "kvq"
PACKED_NAME = "kvq_packed"  # D221: `kvq` takes a padding mask, `kvq_packed` takes none
EXPANSION = "kvq_expansion"  # attribute of an attention module whose layer stores latents
P = ParamSpec("P")
R = TypeVar("R")


class _PackedAttention(Protocol):
    """Step over a packed batch, passed through the model as the keyword `kvq_step`."""

    geometry: ModelGeometry

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Write K and V [tokens, kv_heads, dim], then attend: [tokens, q_heads, dim] in and out.

        The layer's own window applies in addition to the options.
        """

    def attend_over(self, layer: int, q: Tensor, options: AttentionOptions) -> Tensor:
        """Attend like `attend`, but over tokens that a layer has already written."""

    def attend_latents(
        self,
        layer: int,
        q: Tensor,
        rotary: Tensor,
        latents: Tensor,
        expansion: LatentExpansion,
        options: AttentionOptions,
    ) -> Tensor:
        """Write the keys' rotary part and the latents, [tokens, 1, dim], then attend with the heads' queries:
        [tokens, q_heads, dim] in and out."""


class _BatchAttention(Protocol):
    """Layer of a cache between `update` and the attention call that follows."""

    index: int
    handed: Tensor | None  # K as `update` returned it; None if the model code converts it

    @property
    def geometry(self) -> ModelGeometry: ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, options: AttentionOptions
    ) -> Tensor:
        """Write and attend: [batch, heads, tokens, dim] in, [batch, tokens, heads, dim] out.

        `padding`: bool [batch, tokens so far], False where a token is padding. The layer's own window
        applies in addition to the options.
        """


class _Passed(TypedDict, total=False):
    """Keywords that model code passes in addition to Q, K and V. The list is not complete."""

    scaling: float | None
    softcap: float | None
    s_aux: Tensor | None
    sliding_window: int | None
    kvq_step: _PackedAttention


class _MaskKeywords(TypedDict, total=False):
    attention_mask: Tensor | None
    allow_is_causal_skip: bool


class _Waiting(threading.local):
    """Layer that `update` handed over in this thread and that no attention call has received yet."""

    step: _BatchAttention | None = None


_waiting = _Waiting()  # module state, since transformers calls attention by name, without the cache


def register_attention() -> None:
    """Register `attn_implementation="kvq"` with transformers. Further calls have no effect.

    `KvqCache` also registers it. Call this function to use "kvq" in `from_pretrained` before creating a
    cache.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, kvq_attention)
    AttentionInterface.register(PACKED_NAME, kvq_attention)
    AttentionMaskInterface.register(NAME, padding_mask)


def padding_mask(**passed: Unpack[_MaskKeywords]) -> Tensor | None:
    """Return the 2-D padding mask unchanged, bool [batch, tokens so far], as the mask function of "kvq".

    If the model needs more than a causal mask (images, packed sequences), return a mask of invalid shape,
    which KvqCache refuses; kvq's sessions need no mask.
    """
    return (
        passed.get("attention_mask")
        if passed.get("allow_is_causal_skip", True)
        else torch.empty(0, 0, 0, dtype=torch.float32)
    )


def hand_over(step: _BatchAttention) -> None:  # D222: new rows are written by attention, which knows padding
    """Hand a layer's new tokens over to the next attention call in this thread.

    Raises:
        ConfigError: the tokens handed over previously were never consumed by an attention call.
    """
    left, _waiting.step = _waiting.step, step
    if left is not None:
        _waiting.step = None
        raise ConfigError(
            f"layer {left.index} did not attend from kvq's blocks although the config says "
            f"attn_implementation={NAME!r}; pass the model's own config, KvqCache(model.config), and "
            f"choose the attention with model.set_attn_implementation({NAME!r})"
        )


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Make compiled code break its graph here, and run the function and everything it calls uncompiled.

    `torch.compiler.disable` does the same, but its imports take seconds, so they are deferred until the first
    call from compiled code.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            if function not in _DISABLED:
                _DISABLED[function] = torch.compiler.disable(function)
            return _DISABLED[function](*args, **kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call


# torch.compile can't trace through functools.cache.
_DISABLED: dict[Callable[..., Any], Callable[..., Any]] = {}


@eager
def kvq_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **passed: Unpack[_Passed],
) -> tuple[Tensor, None]:
    """Attend over kvq's blocks: [batch, heads, tokens, dim] -> [batch, tokens, heads, dim].

    Raises:
        ModelError: there is neither a kvq session nor a KvqCache, or the model's values contradict its
            config.
        RequestError: the mask has padding that is not on the left.
    """
    number = getattr(module, "layer_idx", None)
    if not isinstance(number, int):
        raise ModelError(f"{type(module).__name__} has no layer_idx; kvq can't tell its layer")
    scale, softcap, sinks = passed.get("scaling"), passed.get("softcap"), passed.get("s_aux")
    if scale is None:
        scale = query.shape[3] ** -0.5
    claims = {
        "q_heads": query.shape[1],
        "kv_heads": key.shape[1],
        "k_head_dim": key.shape[3],
        "v_head_dim": value.shape[3],
        "softcap": softcap,
        "has_sinks": sinks is not None,
    }
    if "sliding_window" in passed:
        claims["window"] = passed["sliding_window"] or None
    options = AttentionOptions(scale=scale, softcap=softcap, sinks=sinks)
    step = passed.get("kvq_step")
    if step is None:
        waiting = _take(number, key)
        _place(waiting.geometry, number, claims)
        return waiting.attend(query, key, value, attention_mask, options), None
    layer = _place(step.geometry, number, claims)
    if query.shape[2] != key.shape[2]:
        raise ModelError(f"layer {number} attends from {query.shape[2]} of a step's {key.shape[2]} tokens")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, dim]
    expansion: LatentExpansion | None = getattr(module, EXPANSION, None)
    if expansion is not None:
        rotary = k[:, :1, expansion.dims.k_dim :]  # the same in all heads
        return step.attend_latents(layer, q, rotary, expansion.take(len(q)), expansion, options)[None], None
    if step.geometry.stores(number):
        return step.attend(layer, q, k, v, options)[None], None
    return step.attend_over(layer, q, options)[None], None


def _place(geometry: ModelGeometry, number: int, claims: dict[str, float | None]) -> int:
    """Return the index of the layer whose store holds the K and V of layer `number`.

    Raises:
        ModelError: the config gives the layer no K and V, or the model code contradicts the config.
    """
    place = geometry.place(number)
    if place is None:
        raise ModelError(f"{geometry.model_type} layer {number} attends, but has no K and V by its config")
    own = geometry.layers[place].expanded(geometry.q_heads)
    of_model = {
        "q_heads": geometry.q_heads_of(place),
        "softcap": geometry.softcap,
        "has_sinks": geometry.has_sinks_of(place),
    }
    for name, value in claims.items():
        expected = getattr(own, name) if name not in of_model else of_model[name]
        if value != expected:
            raise ModelError(
                f"{geometry.model_type} layer {number}: the model code uses {name}={value}, "
                f"its config says {expected}; kvq can't tell which is right"
            )
    return place


def _take(layer: int, key: Tensor) -> _BatchAttention:
    step, _waiting.step = _waiting.step, None
    if step is None:
        raise ModelError(
            f"attn_implementation={NAME!r} attends from kvq's blocks and found none; pass "
            f"past_key_values=KvqCache(model.config), or run the model by kvq.load"
        )
    if step.index != layer or (step.handed is not None and step.handed is not key):
        raise ModelError(
            f"layer {layer} attends with K that is not what KvqCache.update returned for layer "
            f"{step.index}; kvq can't run this model's attention, choose 'sdpa'"
        )
    return step
