"""Weight of a Linear layer from a GGUF file, in the form that kernels take."""

import torch

from kvq.kernels import PlainWeight, QuantizedWeight
from kvq.models.gguf.tensors import GgufTensors


def gguf_weight(stored: GgufTensors, name: str, dtype: torch.dtype) -> QuantizedWeight | PlainWeight:
    """Return the weight of the Linear layer whose tensor is `name`; `dtype`: the model's computation dtype.

    Blocks are dequantized: exactly for computation in fp32.
    """
    values = stored[name]
    return PlainWeight.narrowest(values if dtype is torch.float32 else values.to(dtype))
