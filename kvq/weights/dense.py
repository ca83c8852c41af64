"""A weight of floats that multiplies rows in torch, several layers' at once."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Dense:
    """y = x W^T, of layers with the same inputs, one after the other."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        """Nothing is multiplied before `join`."""
        self._layers = tuple(layers)
        self.in_features = layers[0].in_features
        self.out_features = sum(layer.out_features for layer in layers)
        self.transposed = torch.empty(0)

    def join(self) -> None:
        """Make the weights parts of one tensor; the layers go on with their parts."""
        if len(self._layers) == 1:
            self.transposed = self._layers[0].weight.detach().t()
            return
        joined = torch.cat([layer.weight.detach() for layer in self._layers])
        parts = joined.split([layer.out_features for layer in self._layers])
        for layer, part in zip(self._layers, parts, strict=True):
            layer.weight.data = part
        self.transposed = joined.t()

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out] of x's dtype."""
        return torch.mm(x, self.transposed)

    def added_to(self, bias: Tensor, x: Tensor) -> Tensor:
        """The same plus a bias [out], in one launch."""
        return torch.addmm(bias, x, self.transposed)
