"""Decoder layers in four calls and norms in one, on CPUs, where a decoded token waits for Python.

A step of one token spends as long between the kernels of a small model as inside them. Layers of the plainest
kind, which most families have, are run here without the forty tensor operations and module calls of their
own code; that code stays in place, runs whatever is no step of kvq's, and the load-time probe compares both.
"""

import weakref
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from kvq.kernels import AttentionOptions
from kvq.kernels.decoder.cpu import CpuDecoder, DecoderWeights
from kvq.kernels.native.library import load
from kvq.kernels.rms_norm.cpu import rms_norm
from kvq.kernels.rms_norm.weight import NormWeight
from kvq.kernels.rope.cpu import MOST_DIM
from kvq.models.step import PackedStep
from kvq.weights import PackedLinear, hooks_of
from kvq.weights.install import GatedMLP, JoinedPart

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # max|a-b| / max|b|


class FusedRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight; what a family adds to its weight is in it."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., dim] -> the same."""
        return rms_norm(hidden_states, self.weight, self.eps)


@torch.no_grad()
def fuse_norms(model: nn.Module) -> None:
    """Replace a model's RMS norms, each after it was tried on two rows; others stay what they are."""
    if isinstance(load(), str):
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and (fused := _fused(child)) is not None:
                setattr(parent, name, fused)


def _fused(norm: nn.Module) -> FusedRMSNorm | None:
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2, len(weight), generator=generator) * torch.tensor([[0.01], [30.0]])).to(weight.dtype)
    wanted = norm(x)
    for own in (weight, 1 + weight.float()):  # Gemma stores what it adds to 1
        fused = FusedRMSNorm(own.detach().clone(), eps)
        error = (fused(x) - wanted).float().abs().amax(-1) / wanted.float().abs().amax(-1)
        if wanted.dtype == x.dtype and bool((error <= _TOLERANCE.get(x.dtype, 0)).all()):
            return fused
    return None


# Layers that add attention of normed inputs, then an MLP of normed inputs, and turn whole heads by halves.
_LAYERS = {
    f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "SeedOss")
}
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = ("q_norm", "k_norm")


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


class _Passed(TypedDict, total=False):
    """What a step needs of the keywords that transformers hands to a layer."""

    position_embeddings: tuple[Tensor, Tensor]
    kvq_step: object


class FusedForward:
    """A layer's forward pass; what is no step of a kvq session goes to the layer's own.

    Parts of the layer are taken as they are when it is made: replace none afterwards, or unfuse first.
    """

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        self._own_of: Callable[..., Any] = type(layer).forward
        self._layer = weakref.ref(layer)  # which holds this: a cycle would outlive its model until collected
        parts = [module for module in layer.modules() if module is not layer]
        self._hooks = [hooks for own in parts for hooks in hooks_of(own)]
        self._decoder = CpuDecoder(_weights(layer))
        self._queries: int = attention.q_proj.out_features // attention.head_dim
        self._turned = self._queries + attention.k_proj.out_features // attention.head_dim
        self._options = AttentionOptions(scale=attention.scaling)
        self._index: int = attention.layer_idx

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Unpack[_Passed]) -> Any:
        """[1, rows, hidden] -> the same."""
        step = options.get("kvq_step")
        if not isinstance(step, PackedStep) or args or any(self._hooks):
            return self._own_of(self._layer(), hidden_states, *args, **options)
        cos, sin = options["position_embeddings"]
        x = hidden_states[0]  # [rows, hidden]
        heads = self._decoder.before(x, cos[0], sin[0])
        q, k, v = heads[:, : self._queries], heads[:, self._queries : self._turned], heads[:, self._turned :]
        attended = step.attend(self._index, q, k, v, self._options)
        return self._decoder.after(x, attended.flatten(1))[None]


def _weights(layer: Any) -> DecoderWeights:
    """A plain layer's parts."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    own = [norm for name in _HEAD_NORMS if (norm := getattr(attention, name, None)) is not None]
    return DecoderWeights(
        input_norm=_norm(layer.input_layernorm),
        qkv=attention.q_proj.kernel.joined.kernel,
        qkv_bias=_joined_bias(projections),
        head_norms=(_norm(own[0]), _norm(own[1])) if own else None,
        output=attention.o_proj.kernel,
        output_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.detach(),
        output_norm=_norm(layer.post_attention_layernorm),
        gate_up=mlp.gate_proj.kernel.joined.kernel,
        down=mlp.down_proj.kernel,
        activation=mlp.kernel.activation,
        q_heads=attention.q_proj.out_features // attention.head_dim,
        kv_heads=attention.k_proj.out_features // attention.head_dim,
        dim=attention.head_dim,
    )


def _norm(norm: FusedRMSNorm) -> NormWeight:
    return NormWeight(weight=norm.weight.detach(), eps=norm.eps)


def _joined_bias(projections: list[Any]) -> Tensor | None:
    known = [projection.bias.detach() for projection in projections if projection.bias is not None]
    if not known:
        return None
    biases = [
        known[0].new_zeros(projection.out_features) if projection.bias is None else projection.bias.detach()
        for projection in projections
    ]
    return torch.cat(biases)


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
    if set(own) - set(_HEAD_NORMS) != _PROJECTIONS or not all(
        isinstance(norm, FusedRMSNorm) for norm in norms
    ):
        return False
    if not all(isinstance(x, PackedLinear) and x.backend == "cpu" for x in projections):
        return False
    dim: int = attention.head_dim
    return (
        isinstance(own["q_proj"].kernel, JoinedPart)
        and dim <= MOST_DIM
        and dim % 2 == 0
        and own["q_proj"].out_features % dim == own["k_proj"].out_features % dim == 0
        and own["k_proj"].out_features == own["v_proj"].out_features
        and ("q_norm" in own) == ("k_norm" in own)
    )
