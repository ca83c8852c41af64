"""A weight of floats that multiplies rows in torch, several layers' at once."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Dense:
    """y = x W^T, of torch."""

    def __init__(self, weight: Tensor) -> None:
        """`weight`: [out, in]."""
        self.out_features, self.in_features = weight.shape
        self.transposed = weight.t()

    @classmethod
    def of(cls, layers: Sequence[nn.Linear]) -> "Dense":
        """Layers with the same inputs, whose weights become parts of one tensor."""
        if len(layers) == 1:
            return cls(layers[0].weight.detach())
        joined = torch.cat([layer.weight.detach() for layer in layers])
        parts = joined.split([layer.out_features for layer in layers])
        for layer, part in zip(layers, parts, strict=True):
            layer.weight.data = part
        return cls(joined)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out] of x's dtype."""
        return torch.mm(x, self.transposed)

    def added_to(self, bias: Tensor, x: Tensor) -> Tensor:
        """The same plus a bias [out], in one launch."""
        return torch.addmm(bias, x, self.transposed)
