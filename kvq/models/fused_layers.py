"""Decoder layers in eight calls on CPUs, where a decoded token waits for Python.

A step of one token spends as long between the kernels of a small model as inside them. Layers of the plainest
kind, which most families have, are run here without the forty tensor operations and module calls of their
own code; that code stays in place, runs whatever is no step of kvq's, and the load-time probe compares both.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvq.kernels.linear.mlp import CpuMLP
from kvq.kernels.rms_norm.cpu import rms_norm
from kvq.kernels.rope.cpu import MOST_DIM, rope
from kvq.models.norms import FusedRMSNorm
from kvq.models.step import PackedStep
from kvq.weights import PackedLinear
from kvq.weights.install import GatedMLP
from kvq.weights.joined import JoinedPart

# Layers that add attention of normed inputs, then an MLP of normed inputs, and turn whole heads by halves.
_LAYERS = {
    f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "SeedOss")
}
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}


def fuse_layers(model: nn.Module) -> int:
    """Let a model's plain layers run steps in few calls; how many there were."""
    found = [layer for layer in model.modules() if _is_plain(layer)]
    for layer in found:
        layer.forward = FusedForward(layer)
    return len(found)


def is_fused(model: nn.Module, layers: int) -> bool:
    """True if all layers run in compiled kernels, whose results for a row never depend on other rows."""
    return sum(isinstance(layer.__dict__.get("forward"), FusedForward) for layer in model.modules()) == layers


def unfuse_layers(model: nn.Module) -> None:
    """Give all layers their own code back."""
    for layer in model.modules():
        if isinstance(layer.__dict__.get("forward"), FusedForward):
            del layer.forward


class FusedForward:
    """A layer's forward pass; what is no step of a kvq session goes to the layer's own.

    Parts of the layer are taken as they are when it is made: replace none afterwards, or unfuse first.
    """

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        self._own_of: Callable[..., Any] = type(layer).forward
        self._layer = weakref.ref(layer)  # which holds this: a cycle would outlive its model until collected
        parts = [module for module in layer.modules() if module is not layer]
        self._hooked = [hooks for own in parts for hooks in (own._forward_hooks, own._forward_pre_hooks)]
        self._norms = [
            (norm.weight, norm.eps) for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        ]
        self._head_norms = [
            (norm.weight, norm.eps)
            for name in ("q_norm", "k_norm")
            if (norm := getattr(attention, name, None))
        ]
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self._joined = attention.q_proj.kernel.joined.kernel
        self._bias = _joined_bias(projections)
        self._output, self._output_bias = attention.o_proj.kernel, attention.o_proj.bias
        self._mlp: CpuMLP = layer.mlp.kernel
        self._dim: int = attention.head_dim
        self._heads = [projection.out_features // self._dim for projection in projections]
        self._scale: float = attention.scaling
        self._index: int = attention.layer_idx

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """[1, rows, hidden] -> the same."""
        step = options.get("kvq_step")
        if not isinstance(step, PackedStep) or args or any(self._hooked):
            return self._own_of(self._layer(), hidden_states, *args, **options)
        cos, sin = options["position_embeddings"]
        x = hidden_states[0]  # [rows, hidden]
        q, k, v = self._projected(x, cos[0], sin[0])
        attended = step.attend(self._index, q, k, v, scale=self._scale, softcap=None, sinks=None)
        added = self._output(attended.view(x.shape[0], -1))
        x = x + (added if self._output_bias is None else added + self._output_bias)
        weight, eps = self._norms[1]
        return (x + self._mlp(rms_norm(x, weight, eps)))[None]

    def _projected(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, turned, and values: [rows, heads, dim] each."""
        weight, eps = self._norms[0]
        joined = self._joined(rms_norm(x, weight, eps))
        if self._bias is not None:
            joined += self._bias
        heads = joined.view(x.shape[0], -1, self._dim)
        queries, keys, _ = self._heads
        turned = heads[:, : queries + keys]
        if not self._head_norms:
            rope(turned, cos, sin)
            q, k = turned[:, :queries], turned[:, queries:]
        else:
            parts = (turned[:, :queries], turned[:, queries:])
            q, k = (
                rms_norm(part, weight, eps)
                for part, (weight, eps) in zip(parts, self._head_norms, strict=True)
            )
            rope(q, cos, sin)
            rope(k, cos, sin)
        return q, k, heads[:, queries + keys :]


def _joined_bias(projections: list[Any]) -> Tensor | None:
    if all(projection.bias is None for projection in projections):
        return None
    return torch.cat(
        [
            projection.bias.detach() if projection.bias is not None else torch.zeros(projection.out_features)
            for projection in projections
        ]
    )


def _is_plain(layer: nn.Module) -> bool:
    """True of a layer whose code is known and whose parts can all run in compiled kernels."""
    if "forward" in layer.__dict__ or type(layer).__name__ not in _LAYERS:
        return False
    parts = dict(layer.named_children())
    attention: Any = parts.get("self_attn")
    mlp = parts.get("mlp")
    if set(parts) != _PARTS or not isinstance(mlp, GatedMLP) or attention is None:
        return False
    own: dict[str, Any] = dict(attention.named_children())
    norms = [parts["input_layernorm"], parts["post_attention_layernorm"]]
    norms += [own[name] for name in _HEAD_NORMS if name in own]
    projections = [own.get(name) for name in _PROJECTIONS]
    if set(own) - _HEAD_NORMS != _PROJECTIONS or not all(isinstance(norm, FusedRMSNorm) for norm in norms):
        return False
    if not all(isinstance(x, PackedLinear) and x.backend == "cpu" for x in projections):
        return False
    dim: int = attention.head_dim
    return (
        isinstance(own["q_proj"].kernel, JoinedPart)
        and dim <= MOST_DIM
        and all(own[name].out_features % dim == 0 for name in ("q_proj", "k_proj", "v_proj"))
    )
