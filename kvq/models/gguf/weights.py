"""Weight of a Linear layer from a GGUF file, in the form that kernels take."""

from dataclasses import replace

import torch

from kvq.formats.weights import Inputs
from kvq.kernels import PlainWeight, Weight
from kvq.kernels.weight import BlockWeight
from kvq.models.gguf.tensors import GgufTensors


def gguf_weight(stored: GgufTensors, name: str, dtype: torch.dtype, inputs: Inputs) -> Weight:
    """Return the weight of the Linear layer whose tensor is `name`.

    `dtype`: the model's computation dtype; `inputs`: rounding of the inputs of blocks. Blocks stay as they
    are; other types are converted to `dtype`, or to 16 bits if that is exact.
    """
    kind = stored.kind(name)
    if not kind.is_float:
        return BlockWeight(fmt=replace(kind, inputs=inputs), rows=stored.blocks(name))
    values = stored[name]
    return PlainWeight.narrowest(values if dtype is torch.float32 else values.to(dtype))
