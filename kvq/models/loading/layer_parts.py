"""Recognition of the parts of common decoder layers in transformers.

Layers are recognized by their class names; the load-time probe verifies that they were understood correctly.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kvq.kernels import AttentionOptions
from kvq.kernels.decoder.parts import DecoderParts, GatedParts, Product
from kvq.kernels.gated.reference import Activation
from kvq.kernels.rms_norm.reference import NormWeight
from kvq.kernels.rope_write.reference import LayerHeads, Pairs
from kvq.models.parts.norms import norm_weight
from kvq.weights import PackedLinear, runs_library_code
from kvq.weights.install import GatedMLP, JoinedPart
from kvq.weights.linear import ACTIVATIONS, Dense

_Norms = tuple[str | None, str | None, str | None, str | None]
# Names of the norms of a layer's input, of attention's output, of the MLP's input, and of the MLP's output
_BEFORE: _Norms = ("input_layernorm", None, "post_attention_layernorm", None)
_AROUND: _Norms = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_AFTER: _Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GLM4: _Norms = (
    *("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
)
_FAMILIES = {
    **dict.fromkeys(
        ("Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "SeedOss", "Gemma", "Granite"), _BEFORE
    ),
    **dict.fromkeys(("Phi3", "Glm", "SmolLM3", "Arcee", "Mixtral", "Qwen3Moe", "GptOss"), _BEFORE),
    **dict.fromkeys(("Gemma2", "Gemma3"), _AROUND),
    **dict.fromkeys(("Olmo2", "Olmo3", "Exaone4"), _AFTER),
    "Glm4": _GLM4,
}
_NEIGHBOURS = ("Glm", "Glm4")
_PARTS = {"self_attn", "mlp", "resid_attn_dropout", "resid_mlp_dropout"}


def describe(layer: Any, inner: Any, window: int | None) -> DecoderParts | None:
    """Return the parts of a decoder layer of the model `inner`, or None if its code is not recognized.

    `window`: number of tokens that the layer's attention sees; None for all.
    """
    name = type(layer).__name__.removesuffix("DecoderLayer")
    names = _FAMILIES.get(name)
    if names is None or type(layer).__name__ == name:
        return None
    if not all(map(runs_library_code, (inner, inner.rotary_emb, *layer.modules()))):
        return None
    if not set(dict(layer.named_children())) <= {*_PARTS, *names}:
        return None
    try:
        found = _described(layer, inner, name, names)
    except _Unknown:
        return None
    return replace(found, options=found.options.within(window))


class _Unknown(Exception):
    """Raised if a part of a layer is not recognized."""


def _described(layer: Any, inner: Any, name: str, names: _Norms) -> DecoderParts:
    attention = layer.self_attn
    projections = _projections(attention)
    heads = _heads(attention, projections, inner, name)
    qkv, output = _product(projections), _product([attention.o_proj])
    if qkv.out_features != heads.width or output.in_features != heads.q_heads * heads.v_dim:
        raise _Unknown
    norms = [None if own is None else _norm(getattr(layer, own)) for own in names]
    return DecoderParts(
        index=attention.layer_idx,
        input_norm=norms[0],
        qkv=qkv,
        heads=heads,
        options=AttentionOptions(
            scale=attention.scaling,
            softcap=getattr(attention, "attn_logit_softcapping", None),
            sinks=getattr(attention, "sinks", None),
        ),
        output=output,
        output_bias=_bias([attention.o_proj]),
        attention_norm=norms[1],
        mlp_norm=norms[2],
        mlp=_mlp(layer.mlp),
        out_norm=norms[3],
        scale=float(getattr(layer, "residual_multiplier", 1.0)),
        angles=_kind(inner, attention.layer_idx),
    )


def _projections(attention: Any) -> list[nn.Module]:
    """Return the query, key and value projections, fused or not; raise _Unknown for other submodules."""
    own = dict(attention.named_children())
    known = {"o_proj", "q_norm", "k_norm"}
    for names in (("q_proj", "k_proj", "v_proj"), ("qkv_proj",)):
        if set(own) - known == set(names):
            return [own[name] for name in names]
    raise _Unknown


def _heads(attention: Any, projections: Sequence[nn.Module], inner: Any, name: str) -> LayerHeads:
    dim, config = attention.head_dim, attention.config
    own = [_norm(getattr(attention, n)) for n in ("q_norm", "k_norm") if hasattr(attention, n)]
    if len(own) == 1:
        raise _Unknown
    kind = _kind(inner, attention.layer_idx)
    frequencies: Tensor = getattr(inner.rotary_emb, f"{kind}_inv_freq" if kind else "inv_freq")
    return LayerHeads(
        q_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        k_dim=dim,
        v_dim=dim,
        rotary_dim=2 * len(frequencies) if _has_rotary(attention, name) else 0,
        pairs=Pairs.NEIGHBOURS if name in _NEIGHBOURS else Pairs.HALVES,
        norms=(own[0], own[1]) if own else None,
        bias=_bias(projections),
    )


def _has_rotary(attention: Any, name: str) -> bool:
    """Return False for layers without rotary positions."""
    if name == "Exaone4":
        return attention.sliding_window is None or bool(attention.is_sliding)
    return bool(getattr(attention, "use_rope", True))


def _kind(inner: Any, index: int) -> str:
    """Return the name of a layer's frequencies in the rotary module; "" if all layers share them."""
    kinds = getattr(inner.config, "layer_types", None)
    if kinds is None or not hasattr(inner.rotary_emb, f"{kinds[index]}_inv_freq"):
        return ""
    return str(kinds[index])


def _mlp(mlp: Any) -> GatedParts | Callable[[Tensor], Tensor]:
    """Return the parts of a gated MLP, or a function that runs any other MLP."""
    own = dict(mlp.named_children())
    if isinstance(mlp, GatedMLP):
        return _gated([own["gate_proj"], own["up_proj"]], own["down_proj"], mlp.kernel.activation)
    gates = [own[n] for n in ("gate_proj", "up_proj", "gate_up_proj") if n in own]
    activation = ACTIVATIONS.get(type(own.get("act_fn", own.get("activation_fn"))).__name__)
    linears = [*gates, own.get("down_proj")]
    plain = all(isinstance(x, nn.Linear | PackedLinear) and x.bias is None for x in linears)
    if activation is None or not plain or len(own) != len(linears) + 1:
        return _rows_of(mlp)
    return _gated(gates, own["down_proj"], activation)


def _gated(gates: Sequence[nn.Module], down: nn.Module, activation: Activation) -> GatedParts:
    return GatedParts(gate_up=_product(gates), down=_product([down]), activation=activation)


def _rows_of(mlp: nn.Module) -> Callable[[Tensor], Tensor]:
    """Wrap a module for [1, rows, hidden] as a function of [rows, hidden] that drops any router scores."""

    def run(x: Tensor) -> Tensor:
        found = mlp(x[None])
        output: Tensor = found[0] if isinstance(found, tuple) else found
        return output.view(x.shape)

    return run


def _norm(norm: Any) -> NormWeight:
    found = norm_weight(norm)
    if found is None:
        raise _Unknown
    return found


def _bias(layers: Sequence[nn.Module]) -> Tensor | None:
    """Return the concatenated biases of layers, or None if no layer has a bias."""
    given: list[Any] = list(layers)
    known = [layer.bias.detach() for layer in given if layer.bias is not None]
    if not known:
        return None
    zeros = [known[0].new_zeros(layer.out_features) for layer in given]
    biases = zip(given, zeros, strict=True)
    return torch.cat([zero if layer.bias is None else layer.bias.detach() for layer, zero in biases])


def _product(layers: Sequence[nn.Module]) -> Product:
    """Return Linear layers that share their input as one product."""
    given: list[Any] = list(layers)
    if all(type(layer) is nn.Linear for layer in given):
        return Dense(given)
    if not all(isinstance(layer, PackedLinear) for layer in given):
        raise _Unknown
    kernels = [layer.kernel for layer in given]
    if all(isinstance(kernel, JoinedPart) for kernel in kernels):
        joined = kernels[0].joined
        if [own.joined for own in kernels] != [joined] * len(kernels) or kernels != joined.parts:
            raise _Unknown
        product: Product = joined.kernel
        return product
    if len(kernels) > 1 or isinstance(kernels[0], JoinedPart):
        raise _Unknown
    alone: Product = kernels[0]
    return alone
