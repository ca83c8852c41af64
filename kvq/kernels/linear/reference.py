"""Reference `linear_w4`, `linear_w8` and `linear_blocks`, the definition of correct results: dequantize the
weight, round inputs by token or group if the format requires it, and multiply in fp32."""

import torch
from torch import Tensor
from torch.nn import functional

from kvq.formats.weights import Inputs
from kvq.kernels.codec import e4m3
from kvq.kernels.weight import BlockWeight, PlainWeight, QuantizedWeight, Weight


def quantize_inputs(x: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:  # D179: amax / 127, as in vLLM
    """Return codes as fp32 integers (or E4M3 values), and scales fp32 [..., 1]; x: fp32 [..., in].

    The scale is the row's largest magnitude divided by the largest code; the scale of a row of zeros is 1.
    """
    largest = e4m3.LARGEST if inputs is Inputs.FP8 else 127.0
    amax = x.abs().amax(-1, keepdim=True)
    scale = (amax / largest).where(amax > 0, 1.0)
    scaled = x / scale
    if inputs is not Inputs.FP8:
        return scaled.round().clamp(-127, 127), scale
    return e4m3.decode(e4m3.encode(scaled.contiguous())), scale


def rounded_inputs(x: Tensor, inputs: Inputs) -> Tensor:
    """Return inputs as rounded for the product: fp32 [..., in], each value a code times its row's scale."""
    if inputs is Inputs.FULL:
        return x
    codes, scale = quantize_inputs(x, inputs)
    return codes * scale


class ReferenceLinear:
    """y = x W^T; a quantized weight is stored as codes and dequantized at every call."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        self.nbytes = weight.nbytes
        self.code_bytes = weight.codes.nbytes if isinstance(weight, QuantizedWeight) else weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply, summing in fp32: [rows, in] -> [rows, out] in x's dtype."""
        own, inputs = self.weight, x.float()
        if isinstance(own, PlainWeight):
            weight = own.values.float()
        else:
            weight = own.dequantize(torch.float32)
            group = own.fmt.group if isinstance(own, BlockWeight) else own.in_features
            inputs = rounded_inputs(inputs.unflatten(1, (-1, group)), own.fmt.inputs).flatten(1)
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(inputs, weight).to(x.dtype)
