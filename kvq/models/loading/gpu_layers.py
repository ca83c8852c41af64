"""Decoder layers in Triton: one launch adds to the residual and normalizes the sum for the next sublayer."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from kvq.kernels.decoder.parts import DecoderParts, GatedParts, Product
from kvq.kernels.gated.triton import gated
from kvq.kernels.gpu.support import current
from kvq.kernels.rms_norm.reference import NormWeight
from kvq.kernels.rms_norm.triton import AddNorm
from kvq.models.parts.step import PackedStep
from kvq.weights.linear import Dense

Angles = dict[str, tuple[Tensor, Tensor]]


def gpu_layers(
    layers: Sequence[DecoderParts], norm: NormWeight
) -> Callable[[Tensor, Angles, PackedStep], Tensor]:
    """Return a function that runs all decoder layers of a model and its final norm.

    The function takes [rows, hidden], which becomes the residual, and returns normed hidden states of the
    same shape.
    """
    following = [*(parts.input_norm for parts in layers[1:]), norm]
    own = [_Layer(parts, after) for parts, after in zip(layers, following, strict=True)]
    first = None if layers[0].input_norm is None else AddNorm(layers[0].input_norm)

    def run(x: Tensor, angles: Angles, step: PackedStep) -> Tensor:
        with current(x.device):
            h = x if first is None else first(x, None)
            for layer in own:
                h = layer(h, x, angles, step)
            return h

    return run


class _Layer:
    def __init__(self, parts: DecoderParts, following: NormWeight | None) -> None:
        """`following`: the input norm of the next layer, or the model's final norm."""
        products = [parts.qkv, parts.output]
        products += [parts.mlp.gate_up, parts.mlp.down] if isinstance(parts.mlp, GatedParts) else []
        for product in products:
            if isinstance(product, Dense):
                product.join()
        self._parts = parts
        self._output = _biased(parts.output, parts.output_bias)
        self._mlp = partial(_gated, parts.mlp) if isinstance(parts.mlp, GatedParts) else parts.mlp
        self._mlp_norm = AddNorm(parts.mlp_norm, post=parts.attention_norm, scale=parts.scale)
        self._following = AddNorm(following, post=parts.out_norm, scale=parts.scale)

    def __call__(self, h: Tensor, residual: Tensor, angles: Angles, step: PackedStep) -> Tensor:
        """Return the next layer's normed inputs, [rows, hidden]; update `residual` in place."""
        parts = self._parts
        turned = angles[parts.angles] if parts.heads.rotary_dim else None
        attended = step.attend_joined(parts.index, parts.qkv(h), turned, parts.heads, parts.options)
        h = self._mlp_norm(self._output(attended.flatten(1)), residual)
        return self._following(self._mlp(h), residual)


def _gated(parts: GatedParts, x: Tensor) -> Tensor:
    return parts.down(gated(parts.gate_up(x), parts.activation))


def _biased(product: Product, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    if bias is None:
        return product
    if isinstance(product, Dense):
        return partial(product.added_to, bias)
    return lambda x: product(x) + bias
