"""The definition of correct for `linear_w4` and `linear_w8`: dequantize, round inputs, multiply in fp32."""

import torch
from torch import Tensor
from torch.nn import functional

from kvq.kernels.linear.inputs import rounded_inputs
from kvq.kernels.linear.weight import QuantizedWeight


class ReferenceLinear:
    """y = x W^T over a weight that stays in its codes and is dequantized at every call."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.weight = weight
        self.nbytes = weight.nbytes
        self.code_bytes = weight.codes.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out] of x's dtype; summed in fp32."""
        weight = self.weight.dequantize(torch.float32)
        inputs = rounded_inputs(x.float(), self.weight.fmt.inputs)
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(inputs, weight).to(x.dtype)
