"""Parts of a decoder layer: products, norms and sums, described once for both C++ and Triton."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.gated.reference import Activation
from kvq.kernels.rms_norm.reference import NormWeight
from kvq.kernels.rope_write.reference import LayerHeads


class Product(Protocol):
    """A weight that multiplies rows: [rows, in] -> [rows, out], in the dtype of the rows."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GatedParts:
    """down(activation(gates) * rest), where gate_up returns gates and rest side by side."""

    gate_up: Product
    down: Product
    activation: Activation


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecoderParts:  # D169: one description for C++ and Triton
    """A decoder layer; norms that are None are left out:

    x = x + scale * attention_norm(output(attention(heads of qkv(input_norm(x)))))
    x = x + scale * out_norm(mlp(mlp_norm(x)))
    """

    index: int
    input_norm: NormWeight | None
    qkv: Product  # of all heads; their bias is in `heads`
    heads: LayerHeads
    options: AttentionOptions
    output: Product
    output_bias: Tensor | None
    attention_norm: NormWeight | None
    mlp_norm: NormWeight | None
    mlp: GatedParts | Callable[[Tensor], Tensor]  # experts and others: [rows, hidden] -> the same
    out_norm: NormWeight | None
    scale: float
    angles: str  # name of the model's angles for its heads
