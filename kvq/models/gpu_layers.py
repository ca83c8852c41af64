"""Decoder layers in Triton: what is added to the residual is normed for the next half in the same launch."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from kvq.kernels.decoder.parts import DecoderParts, GatedParts, Product
from kvq.kernels.gated.triton import gated
from kvq.kernels.rms_norm.triton import add_norm
from kvq.kernels.rms_norm.weight import NormWeight
from kvq.models.device import current
from kvq.models.step import PackedStep
from kvq.weights.dense import Dense


class GpuLayers:
    """All layers of a model and its last norm."""

    def __init__(self, layers: Sequence[DecoderParts], norm: NormWeight) -> None:
        self._layers = [_Layer(parts) for parts in layers]
        self._first = layers[0].input_norm
        self._next = [*(parts.input_norm for parts in layers[1:]), norm]

    def __call__(self, x: Tensor, angles: dict[str, tuple[Tensor, Tensor]], step: PackedStep) -> Tensor:
        """[rows, hidden], which becomes the residual -> the same, normed."""
        with current(x.device):
            return self._all(x, angles, step)

    def _all(self, x: Tensor, angles: dict[str, tuple[Tensor, Tensor]], step: PackedStep) -> Tensor:
        h = x if self._first is None else add_norm(x, None, self._first)
        for layer, norm in zip(self._layers, self._next, strict=True):
            parts = layer.parts
            heads = parts.qkv(h)
            turned = angles[parts.angles] if parts.heads.rotary_dim else None
            attended = step.attend_joined(parts.index, heads, turned, parts.heads, parts.options)
            y = layer.output(attended.flatten(1))
            h = add_norm(y, x, parts.mlp_norm, post=parts.attention_norm, scale=parts.scale)
            h = add_norm(layer.mlp(h), x, norm, post=parts.out_norm, scale=parts.scale)
        return h


class _Layer:
    def __init__(self, parts: DecoderParts) -> None:
        self.parts = parts
        self.output = _biased(parts.output, parts.output_bias)
        self.mlp = _gated(parts.mlp) if isinstance(parts.mlp, GatedParts) else parts.mlp


def _gated(parts: GatedParts) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        return parts.down(gated(parts.gate_up(x), parts.activation))

    return run


def _biased(product: Product, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    if bias is None:
        return product
    if isinstance(product, Dense):
        return partial(product.added_to, bias)
    return lambda x: product(x) + bias
