"""Weights in the order in which a GPU's threads read them: packed once, then read at every step."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from kvq.formats.weights import Inputs, WeightCode, WeightFormat
from kvq.kernels.codec.ggml import scale_codes, six_bits
from kvq.kernels.weight import BlockWeight, QuantizedWeight

OUTPUTS = 64  # rows of output are padded to a multiple of this


class Kind(Enum):
    """Layout of codes in memory, and the numbers to which codes are converted before the product."""

    NIBBLES = 0  # q + 8, to floats
    SIGNED_NIBBLES = 1  # two's complement, to INT8
    INT8 = 2  # to floats
    FP8 = 3  # to floats
    ROWS = 4  # bytes in rows of inputs, multiplied directly
    Q4_K = 5  # as NIBBLES; from here on, both halves of a block have scales of their own
    Q6_K = 6  # nibbles and two more bits, to floats


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedWeight:
    """A weight in blocks of `block` inputs; a group is padded with zeros to whole blocks.

    `codes`: [blocks, outputs / runs, 64 bytes], or for ROWS [outputs, blocks * block]. `scale` and `zero`:
    [groups, outputs], with unchanged values; of Q4_K and Q6_K, see `pack_blocks`.

    The 64 bytes of a row are 16 bytes for each of 4 adjacent threads; of 8 adjacent rows, row g is for
    outputs 8u + g. The place of a code's byte within the row, and its nibble, determine the input; see
    `_tiles`.
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
    def width(self) -> int:
        """Number of inputs that are multiplied at a time; for nibbles, half a block."""
        return self.block if self.kind in (Kind.INT8, Kind.FP8, Kind.ROWS) else self.block // 2

    @property
    def groups(self) -> int:
        """Number of scales per output."""
        return self.scale.shape[0]

    @property
    def is_grouped(self) -> bool:
        """True if an output has several scales."""
        return self.groups > 1 or self.kind.value >= Kind.Q4_K.value

    @property
    def blocks(self) -> int:
        """Number of blocks of inputs per output, including padding."""
        return self.groups * self.blocks_per_group

    @property
    def padded_outputs(self) -> int:
        """Number of outputs, including padding."""
        return self.scale.shape[1]

    @property
    def nbytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(x.nbytes for x in (self.codes, self.scale, self.zero, self.order) if x is not None)


def kind_of(weight: QuantizedWeight, *, has_fp8: bool) -> Kind:
    """Return the layout for a weight's format; `has_fp8`: whether the device multiplies FP8."""
    inputs = weight.fmt.inputs
    if weight.fmt.code in (WeightCode.INT4, WeightCode.INT3):
        return Kind.SIGNED_NIBBLES if inputs is Inputs.INT8 else Kind.NIBBLES
    if weight.fmt.code is WeightCode.INT8:
        return Kind.ROWS if inputs is Inputs.INT8 else Kind.INT8
    return Kind.ROWS if inputs is Inputs.FP8 and has_fp8 else Kind.FP8


def pack(weight: QuantizedWeight, kind: Kind) -> PackedWeight:  # D143
    """Arrange the codes in blocks and in the order for `kind`."""
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


def pack_blocks(weight: BlockWeight) -> PackedWeight:  # D388
    """Arrange blocks of GGUF for GPUs: codes with the bits that they have in the file, scales as they are.

    Q4_0 and Q8_0 are codes with a scale per group. Of Q4_K, a word of `scale` has scale and minimum of 256
    values, and one of `zero` those of a block's two groups: the scale in the lower half, or byte. Of Q6_K,
    `scale` has the scale of 256 values, and `zero` those of a block's two groups, a byte each; in a row of
    `codes`, 64 bytes with the lower 4 bits are followed by 32 with the upper bits.
    """
    kind, outputs = weight.fmt, weight.out_features
    if kind.name not in ("Q4_K", "Q6_K"):
        return _pack_simple(weight)
    padded = functional.pad(weight.rows, (0, 0, 0, -outputs % OUTPUTS))
    b, rows = padded.view(-1, kind.nbytes), len(padded)
    if kind.name == "Q4_K":
        codes = _placed(b[:, 16:].reshape(rows, -1, 32), 2, (2, 4, 2))
        scale = b[:, :4].contiguous().view(torch.int32)
        fine = torch.stack(scale_codes(b), -1).view(len(b), -1).view(torch.int32)
    else:
        codes = _six_bits(six_bits(b).view(rows, -1, 32))
        scale = b[:, 208:].contiguous().view(torch.float16)
        fine = b[:, 192:208].contiguous().view(torch.int16)
    halves, runs = fine.shape[1], 2 if kind.name == "Q4_K" else 4
    scale, fine = (x.view(rows, -1).T.contiguous() for x in (scale, fine))
    own = {"block": kind.values // halves, "blocks_per_group": halves, "group": kind.values, "runs": runs}
    sizes = {"in_features": weight.in_features, "out_features": outputs}
    return PackedWeight(kind=Kind[kind.name], codes=codes, scale=scale, zero=fine, order=None, **own, **sizes)


def _pack_simple(weight: BlockWeight) -> PackedWeight:
    """Pack Q4_0 or Q8_0, whose blocks have one scale."""
    b, outputs = weight.rows.reshape(-1, weight.fmt.nbytes), weight.out_features
    code = WeightCode.INT4 if weight.fmt.name == "Q4_0" else WeightCode.INT8
    q = b[:, 2:].view(torch.int8)
    if code is WeightCode.INT4:
        q = torch.cat((b[:, 2:] & 15, b[:, 2:] >> 4), 1).view(torch.int8) - 8
    scale = b[:, :2].contiguous().view(torch.float16).view(outputs, -1)
    fmt = WeightFormat(code=code, group_size=weight.fmt.group)
    own = QuantizedWeight.pack(fmt, q.reshape(outputs, -1), scale)
    return pack(own, kind_of(own, has_fp8=False))


def _six_bits(codes: Tensor) -> Tensor:
    """Rearrange codes of Q6_K [outputs, blocks, 32] into [blocks, outputs / 4, 96].

    Products take codes less 32, so the uppermost bit is inverted. A byte of the last 32 has the upper bits of
    two bytes of 4 before, of which one is 4 places after the other.
    """
    first, second = codes.chunk(2, dim=2)
    lower = _placed(first & 15 | second << 4, 4, (2, 4, 2))
    upper = _placed((first >> 4 ^ 2) | (second >> 4 ^ 2) << 2, 4, (2, 4, 2))
    even, odd = upper.view(*upper.shape[:2], 8, 2, 4).unbind(3)
    return torch.cat((lower, (even | odd << 4).flatten(2)), 2)


def _widest(kind: Kind) -> int:
    """Return the block size, in inputs, at which each thread's bytes belong to one output."""
    return 64 if kind in (Kind.INT8, Kind.FP8) else 128


def _block(group: int, kind: Kind) -> int:
    """Return the largest block size with the least padding per group; products take 32 INT8 codes."""
    widest = _widest(kind)
    fits = (widest, widest // 2) if kind is Kind.SIGNED_NIBBLES else (widest, widest // 2, widest // 4)
    return min(fits, key=lambda block: (-(-group // block) * block, -block))


def _tiles(codes: Tensor, kind: Kind, runs: int) -> Tensor:
    """Rearrange [outputs, blocks, block] into [blocks, outputs / runs, 64].

    A byte has one code or two: low nibbles have the first half of a block's inputs, and high nibbles the
    second. Thread t of 4 gets its elements of a tensor core's second factor: of 16 inputs, 2t, 2t + 1, 2t + 8
    and 2t + 9 as 16-bit floats, or 4t to 4t + 3 as INT8. (A compiler with another order moves values first.)
    """
    if kind in (Kind.INT8, Kind.FP8):
        return _placed(codes, runs, (2, 4, 2))
    first, second = codes.chunk(2, dim=2)
    if kind is Kind.SIGNED_NIBBLES:
        low, high = (_placed(half & 15, runs, (1, 4, 4)) for half in (first, second))
    else:
        low, high = (_placed(half + 8, runs, (2, 4, 2)) for half in (first, second))
    return low | (high << 4)


def _placed(codes: Tensor, runs: int, sixteen: tuple[int, int, int]) -> Tensor:
    """Rearrange [outputs, blocks, width] into [blocks, outputs / runs, 64], with 4 bytes per thread."""
    outputs, blocks, _ = codes.shape
    # [eight outputs, run, output of 8, block, word, half of a word, thread, byte]
    parts = codes.view(outputs // (8 * runs), runs, 8, blocks, 4 // runs, *sixteen)
    return parts.permute(3, 0, 2, 6, 1, 4, 5, 7).reshape(blocks, outputs // runs, 64)
