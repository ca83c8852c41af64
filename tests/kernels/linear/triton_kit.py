"""Quantized weights for kernel tests."""

from dataclasses import replace

import torch

from kvq.formats.ggml import GGML_TYPES
from kvq.formats.weights import Inputs, WeightCode, parse_weight_format
from kvq.kernels import BlockWeight, QuantizedWeight

FORMATS = (
    *("int4_g128", "int4_g128_asym", "int4_g64_asym", "int4_g40", "int4_g8_asym", "int4", "int3_g32"),
    *("int8", "int8_asym", "int8_g64_asym", "int8_g24", "fp8", "fp8_a8"),
    *("w8a8", "int8_g64_asym_a8", "int8_asym_a8", "w4a8", "int4_g64_asym_a8", "int3_g40_a8"),
)
SHAPES = ((384, 63), (240, 130), (120, 5), (1920, 70))  # inputs, outputs
SMALL_SHAPES = ((384, 63), (240, 130), (120, 5), (640, 70))  # the interpreter takes long over 1,920 inputs

BLOCKS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")  # types of GGUF
_HALVES = {"Q4_K": (0, 2), "Q6_K": (208,)}  # where a block has 16-bit floats


def random_blocks(
    name: str, inputs: int, outputs: int, *, how: Inputs = Inputs.FULL, seed: int = 0
) -> BlockWeight:
    """Random blocks of a type of GGUF, with finite scales of either sign."""
    kind, draw = GGML_TYPES[name], torch.Generator().manual_seed(seed)
    count = inputs // kind.values
    blocks = torch.randint(0, 256, (outputs, count, kind.nbytes), dtype=torch.uint8, generator=draw)
    for at in _HALVES.get(name, (0,)):
        scale = (torch.rand(outputs, count, 1, generator=draw) - 0.5).half()
        blocks[:, :, at : at + 2] = scale.view(torch.uint8)
    return BlockWeight(fmt=replace(kind, inputs=how), rows=blocks.flatten(1))


def random_weight(
    name: str,
    inputs: int,
    outputs: int,
    *,
    dtype: torch.dtype = torch.float32,
    ordered: bool = False,
    seed: int = 0,
) -> QuantizedWeight:
    """Random codes, scales and zero points of a format; `ordered`: inputs lie in an order of their own."""
    fmt = parse_weight_format(name)
    draw = torch.Generator().manual_seed(seed)
    half = 2 ** (fmt.code.bits - 1)
    q = torch.randint(-half, half, (outputs, inputs), generator=draw).to(torch.int8)
    if fmt.code is WeightCode.FP8:
        q = torch.randint(0, 256, (outputs, inputs), generator=draw).to(torch.uint8)
        q[(q & 0x7F) == 0x7F] = 3  # not a number
    shape = (outputs, fmt.groups(inputs))
    scale = (torch.rand(shape, generator=draw) / half + 1e-3).to(dtype)
    zero = None if fmt.symmetric else torch.randint(-half, half, shape, generator=draw).to(torch.int8)
    order = torch.randperm(inputs, generator=draw) if ordered else None
    return QuantizedWeight.pack(fmt, q, scale, zero, order)


def fits(name: str, inputs: int) -> bool:
    """Whether the format's groups divide the inputs."""
    group = parse_weight_format(name).group_size
    return group is None or inputs % group == 0
