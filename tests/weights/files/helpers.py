"""Random quantized weights, and what this package makes of them."""

import torch
from torch import Tensor

from kvq.formats.weights import WeightFormat, parse_weight_format
from kvq.kernels.weight import QuantizedWeight
from kvq.weights import round_weight
from kvq.weights.files import QuantizationScheme, pack_linear, parse_config, quantization_config

NAME = "model.layers.0.self_attn.q_proj"


def random_weight(
    fmt: WeightFormat | str,
    out: int = 24,
    inputs: int = 96,
    *,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
    ordered: bool = False,
) -> QuantizedWeight:
    """Codes at random, every one of them possible, and scales and zero points at random."""
    fmt = parse_weight_format(fmt) if isinstance(fmt, str) else fmt
    random = torch.Generator().manual_seed(seed)
    rounded = round_weight(torch.randn(out, inputs, generator=random) + 0.1, fmt, dtype=dtype)
    if not fmt.code.is_integer:
        return rounded
    half, groups = 2 ** (fmt.code.bits - 1), fmt.groups(inputs)
    q = torch.randint(-half, half, (out, inputs), generator=random).to(torch.int8)
    zero = torch.randint(-half, half, (out, groups), generator=random).to(torch.int8)
    order = torch.randperm(inputs, generator=random) if ordered else None
    return QuantizedWeight.pack(fmt, q, rounded.scale, None if fmt.symmetric else zero, order)


def on_disk(
    file_format: str, weight: QuantizedWeight, name: str = NAME
) -> tuple[QuantizationScheme, dict[str, Tensor]]:
    """The scheme and the tensors of one layer."""
    config = quantization_config(
        file_format, {name: weight.fmt}, ["lm_head"], kv_scales=False, act_order=weight.order is not None
    )
    return parse_config(config), pack_linear(file_format, name, weight)


def unsigned(words: Tensor) -> list[list[int]]:
    """A matrix of words, as written in hexadecimal."""
    return [[word & 0xFFFFFFFF for word in row] for row in words.tolist()]
