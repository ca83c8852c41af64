"""Reference `linear_w4` and `linear_w8`, the definition of correct results: dequantize the weight, round
inputs token by token if the format requires it, and multiply in fp32."""

import torch
from torch import Tensor
from torch.nn import functional

from kvq.formats.weights import Inputs
from kvq.kernels.codec import e4m3
from kvq.kernels.weight import PlainWeight, QuantizedWeight


def quantize_inputs(x: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:  # D179: amax / 127, as in vLLM
    """Return codes as fp32 integers (or E4M3 values), and scales fp32 [rows, 1]; x: fp32 [rows, in].

    The scale is the row's largest magnitude divided by the largest code; the scale of a row of zeros is 1.
    """
    largest = 127.0 if inputs is Inputs.INT8 else e4m3.LARGEST
    amax = x.abs().amax(-1, keepdim=True)
    scale = (amax / largest).where(amax > 0, 1.0)
    scaled = x / scale
    if inputs is Inputs.INT8:
        return scaled.round().clamp(-127, 127), scale
    return e4m3.decode(e4m3.encode(scaled.contiguous())), scale


def rounded_inputs(x: Tensor, inputs: Inputs) -> Tensor:
    """Return inputs as rounded for the product: fp32 [rows, in], each value a code times its row's scale."""
    if inputs is Inputs.FULL:
        return x
    codes, scale = quantize_inputs(x, inputs)
    return codes * scale


class ReferenceLinear:
    """y = x W^T; a quantized weight is stored as codes and dequantized at every call."""

    def __init__(self, weight: QuantizedWeight | PlainWeight) -> None:
        self.weight = weight
        self.code_bytes = weight.codes.nbytes if isinstance(weight, QuantizedWeight) else weight.values.nbytes
        self.nbytes = weight.nbytes if isinstance(weight, QuantizedWeight) else self.code_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply, summing in fp32: [rows, in] -> [rows, out] in x's dtype."""
        own, inputs = self.weight, x.float()
        if isinstance(own, QuantizedWeight):
            weight, inputs = own.dequantize(torch.float32), rounded_inputs(inputs, own.fmt.inputs)
        else:
            weight = own.values.float()
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(inputs, weight).to(x.dtype)
