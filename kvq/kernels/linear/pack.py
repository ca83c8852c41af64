"""Weights in the order in which a GPU's threads want them: packed once, read at every step."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from kvq.formats.weights import Inputs, WeightCode
from kvq.kernels.linear.weight import QuantizedWeight

OUTPUTS = 64  # rows of output are padded to a multiple of so many


class Kind(Enum):
    """How codes lie in memory and what they become before the product."""

    NIBBLES = 0  # q + 8, to floats
    SIGNED_NIBBLES = 1  # two's complement, to INT8
    INT8 = 2  # to floats
    FP8 = 3  # to floats
    ROWS = 4  # bytes in rows of inputs, multiplied as they are


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedWeight:
    """A weight in blocks of `block` inputs; a group is filled up with zeros to whole blocks.

    `codes`: [blocks, outputs / runs, 64 bytes], or of ROWS [outputs, blocks * block]. `scale`
    [groups, outputs], and `zero` likewise, as they were given.

    The 64 bytes of a row are 16 for each of 4 neighbouring threads, whose products take the outputs 8u + g
    of 8 such rows g. The bits of a byte's place in them, and which nibble, say which input it is; see `_tiles`.
    """

    kind: Kind
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None
    block: int  # inputs
    runs: int  # outputs, 8 apart, among a thread's 16 bytes
    blocks_per_group: int
    group: int  # inputs, unpadded
    in_features: int
    out_features: int

    @property
    def groups(self) -> int:
        """Scales of one output."""
        return self.scale.shape[0]

    @property
    def blocks(self) -> int:
        """Blocks of inputs of one output, those that only fill up included."""
        return self.groups * self.blocks_per_group

    @property
    def padded_outputs(self) -> int:
        """Outputs, those that only fill up included."""
        return self.scale.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in (self.codes, self.scale, self.zero, self.order) if x is not None)


def kind_of(weight: QuantizedWeight, *, has_fp8: bool) -> Kind:
    """The layout for a weight's format; `has_fp8`: the device multiplies FP8."""
    inputs = weight.fmt.inputs
    if weight.fmt.code in (WeightCode.INT4, WeightCode.INT3):
        return Kind.SIGNED_NIBBLES if inputs is Inputs.INT8 else Kind.NIBBLES
    if weight.fmt.code is WeightCode.INT8:
        return Kind.ROWS if inputs is Inputs.INT8 else Kind.INT8
    return Kind.ROWS if inputs is Inputs.FP8 and has_fp8 else Kind.FP8


def pack(weight: QuantizedWeight, kind: Kind) -> PackedWeight:
    """Put the codes into blocks and order them for `kind`."""
    codes = weight.codes if weight.fmt.code is WeightCode.FP8 else weight.integers().view(torch.uint8)
    outputs, inputs = codes.shape
    groups = weight.scale.shape[1]
    group = inputs // groups
    block = _block(group, kind)
    runs = _widest(kind) // block if kind is not Kind.ROWS else 1
    blocks_per_group = -(-group // block)
    more = -outputs % OUTPUTS
    fill = blocks_per_group * block - group
    padded = functional.pad(codes.view(outputs, groups, group), (0, fill, 0, 0, 0, more))
    padded = padded.view(outputs + more, groups * blocks_per_group, block)
    return PackedWeight(
        kind=kind,
        codes=padded.flatten(1) if kind is Kind.ROWS else _tiles(padded, kind, runs),
        scale=functional.pad(weight.scale.T, (0, more)).contiguous(),
        zero=None if weight.zero is None else functional.pad(weight.zero.T, (0, more)).contiguous(),
        order=weight.order,
        block=block,
        runs=runs,
        blocks_per_group=blocks_per_group,
        group=group,
        in_features=inputs,
        out_features=outputs,
    )


def _widest(kind: Kind) -> int:
    """Inputs of a block whose threads hold one output each."""
    return 64 if kind in (Kind.INT8, Kind.FP8) else 128


def _block(group: int, kind: Kind) -> int:
    """The block that fills a group up the least, and of such the widest."""
    widest = _widest(kind)
    return min((widest, widest // 2, widest // 4), key=lambda block: (-(-group // block) * block, -block))


def _tiles(codes: Tensor, kind: Kind, runs: int) -> Tensor:
    """[outputs, blocks, block] -> [blocks, outputs / runs, 64], one or two codes a byte.

    The inputs that thread t of 4 holds of a product's second factor, as Triton 3.7 orders them: of 8-bit codes
    as floats 2t, 2t + 1, 2t + 8, 2t + 9 of 16; of nibbles as floats 4t to 4t + 3 of 16; of nibbles as INT8 8t to
    8t + 7 of 32. (Where a compiler orders them otherwise, it exchanges values between threads first.)
    """
    outputs, blocks, _ = codes.shape
    rows = codes.view(outputs // (8 * runs), runs, 8, blocks, -1)  # [row of eight, run, output of 8, block, in]
    words = 4 // runs
    if kind in (Kind.INT8, Kind.FP8):  # inputs: [word, half of its bytes, thread, byte]
        placed = rows.view(*rows.shape[:4], words, 2, 4, 2).permute(3, 0, 2, 6, 1, 4, 5, 7)
        return placed.reshape(blocks, outputs // runs, 64)
    if kind is Kind.NIBBLES:  # inputs: [word, nibble, thread, byte]
        placed = rows.view(*rows.shape[:4], words, 2, 4, 4).permute(5, 3, 0, 2, 6, 1, 4, 7) + 8
    else:  # inputs: [word, thread, nibble, byte]
        placed = rows.view(*rows.shape[:4], words, 4, 2, 4).permute(6, 3, 0, 2, 5, 1, 4, 7)
    low, high = (placed & 15).reshape(2, blocks, outputs // runs, 64)
    return low | (high << 4)
