"""Weights in the order in which CPU kernels read them, in panels of 16 outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional

from kvq.errors import ConfigError
from kvq.formats.weights import WeightCode
from kvq.kernels.native.abi import DTYPES, NUMBERS, struct
from kvq.kernels.native.library import run
from kvq.kernels.native.pages import empty
from kvq.kernels.weight import BlockWeight, PlainWeight, QuantizedWeight

OUTPUTS = 16  # of a panel
COLUMNS = 8  # the number of columns is padded to a multiple
_BF16_COLUMNS = 32  # of weights in bf16, which tiles multiply 32 at a time
_E4M3_NAN = 0x7F
_Matrix = struct("KvqMatrix")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Panels:
    """Memory to which a KvqLinear points.

    `codes`: uint8 [panels, bytes], with q + 128 for INT8, q + 8 for INT4 and INT3, or E4M3FN bytes; for
    unquantized weights, fp32 or fp16 [panels, columns, 16], or bf16 [panels, columns / 2, 16, 2]. `scales`:
    fp32, bf16 or fp16 [panels, groups, 16], None if there are no codes. `zeros`: int8 of the same shape, None
    if symmetric. `order`: int32 [in], None if inputs keep their order. Blocks contain their scales.
    """

    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    order: Tensor | None
    columns: int  # inputs, padded with columns whose inputs are zeros

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes, including padding."""
        return sum(x.nbytes for x in (self.codes, self.scales, self.zeros, self.order) if x is not None)


def pack_panels(weights: Sequence[QuantizedWeight]) -> _Panels:
    """Concatenate the outputs of one or more weights for the same inputs, and pack them.

    Raises:
        ConfigError: formats, inputs or their order differ, or parts of a weight don't match.
    """
    first = weights[0]
    for weight in weights:
        _check(weight)
    for other in weights[1:]:
        if other.fmt != first.fmt or other.in_features != first.in_features or not first.has_order_of(other):
            raise ConfigError(
                f"only weights of one format, input and order can be joined, got {first.fmt.name} over "
                f"{first.in_features} inputs and {other.fmt.name} over {other.in_features}"
            )
    whole = QuantizedWeight.joined(weights)
    scale, bytes_ = whole.scale, _bytes(whole)
    if first.fmt.code is WeightCode.FP8:  # a NaN code makes its whole output NaN
        broken = ((bytes_ & _E4M3_NAN) == _E4M3_NAN).any(1, keepdim=True)
        scale = scale.masked_fill(broken, float("nan"))
    return _Panels(
        codes=_blocked(_padded(bytes_), first.fmt.code),
        scales=_by_panel(scale if scale.dtype.itemsize <= 4 else scale.float()),
        zeros=None if whole.zero is None else _by_panel(whole.zero),
        order=None if first.order is None else first.order.int().contiguous(),
        columns=-(-first.in_features // COLUMNS) * COLUMNS,
    )


def pack_plain(weights: Sequence[PlainWeight]) -> _Panels:
    """Pack unquantized weights as `pack_panels` does, in the narrowest dtype that is exact for all.

    Raises:
        ConfigError: the weights have different numbers of inputs.
    """
    inputs = {weight.in_features for weight in weights}
    if len(inputs) > 1:
        raise ConfigError(f"only weights of the same inputs can be joined, got {sorted(inputs)} of them")
    dtype = reduce(torch.promote_types, (weight.values.dtype for weight in weights))
    pair = 2 if dtype is torch.bfloat16 else 1
    unit = _BF16_COLUMNS if pair == 2 else COLUMNS
    columns = -(-weights[0].in_features // unit) * unit
    parts = [weight.values.to(dtype) for weight in weights]
    parts = [part if part.stride(1) == 1 else part.contiguous() for part in parts]
    shape = -(-sum(map(len, parts)) // OUTPUTS), columns // pair, OUTPUTS
    panels = empty((*shape, *([pair] if pair == 2 else [])), dtype)
    matrices = [_Matrix(part.data_ptr(), len(part), part.stride(0) * part.element_size()) for part in parts]
    given = (_Matrix * len(parts))(*matrices), len(parts), weights[0].in_features, DTYPES[dtype]
    run("pack_plain", *given, panels.data_ptr(), columns, torch.get_num_threads())
    return _Panels(codes=panels, scales=None, zeros=None, order=None, columns=columns)


def pack_blocks(weights: Sequence[BlockWeight]) -> _Panels:
    """Pack weights in blocks of one format, whose outputs are concatenated; see blocks.h.

    Raises:
        ConfigError: formats or inputs differ, or a row is not a number of whole blocks.
    """
    first, kind = weights[0], weights[0].fmt
    for weight in weights:
        if weight.fmt != first.fmt or weight.in_features != first.in_features:
            raise ConfigError(
                f"only weights of one format and input can be joined, got {first.fmt.name} over "
                f"{first.in_features} inputs and {weight.fmt.name} over {weight.in_features}"
            )
        if weight.rows.dtype is not torch.uint8 or weight.rows.shape[1] % kind.nbytes:
            raise ConfigError(
                f"rows of {kind.name} are uint8 in blocks of {kind.nbytes}, got {list(weight.rows.shape)}"
            )
    parts = [weight.rows if weight.rows.stride(1) == 1 else weight.rows.contiguous() for weight in weights]
    count = -(-sum(map(len, parts)) // OUTPUTS)
    panels = empty((count, first.in_features // kind.values * OUTPUTS * kind.panel_bytes), torch.uint8)
    each = ((p.data_ptr(), len(p), p.stride(0), w.is_mapped) for p, w in zip(parts, weights, strict=True))
    matrices = (_Matrix * len(parts))(*(_Matrix(*one) for one in each))
    given = matrices, len(parts), first.in_features, NUMBERS[f"KVQ_{kind.name}"]
    run("pack_blocks", *given, panels.data_ptr(), torch.get_num_threads())
    return _Panels(codes=panels, scales=None, zeros=None, order=None, columns=first.in_features)


def unpack_plain(panels: _Panels, out_features: int, in_features: int) -> Tensor:
    """Return the weight [out, in] that `pack_plain` packed into `panels`, in the panels' dtype."""
    return panels.codes.transpose(1, 2).flatten(0, 1).flatten(1)[:out_features, :in_features]


def _check(weight: QuantizedWeight) -> None:
    """Raise ConfigError unless shapes and order are valid; compiled code doesn't check them."""
    outputs, inputs = weight.out_features, weight.in_features
    scales = (outputs, weight.fmt.groups(inputs))
    if weight.scale.shape != scales or (weight.zero is not None and weight.zero.shape != scales):
        raise ConfigError(f"scales and zero points must be {list(scales)}, got {list(weight.scale.shape)}")
    if weight.order is not None and not torch.equal(weight.order.sort().values, torch.arange(inputs)):
        raise ConfigError(f"the order of inputs must hold every number below {inputs} once")


def _bytes(weight: QuantizedWeight) -> Tensor:
    """Return the codes as nonnegative numbers, uint8 [out, in]."""
    codes = weight.codes
    if weight.fmt.code is WeightCode.FP8:
        return codes
    if weight.fmt.code is WeightCode.INT8:
        return codes.view(torch.uint8) ^ 128
    return torch.stack((codes & 15, codes >> 4), -1).flatten(1)


def _padded(x: Tensor) -> Tensor:
    """Pad [out, in] with zeros to complete panels and to a multiple of `COLUMNS`."""
    if x.shape[0] % OUTPUTS == x.shape[1] % COLUMNS == 0:
        return x
    return functional.pad(x, (0, -x.shape[1] % COLUMNS, 0, -x.shape[0] % OUTPUTS))


def _blocked(x: Tensor, code: WeightCode) -> Tensor:
    """Rearrange [out, in] into [panels, bytes], with 4 inputs of every output per 64-byte row; see lanes.h.

    With nibbles, the low ones form one such row and the high ones the next. With FP8, byte 2 (16 h + o) + b
    is output o for input h + 2 b.
    """
    panels, columns = x.shape[0] // OUTPUTS, x.shape[1]
    if code is WeightCode.FP8:
        quads = x.view(panels, OUTPUTS, columns // 4, 2, 2)  # [panels, o, quads, b, h]
        quads = quads.permute(0, 2, 4, 1, 3)
    else:
        quads = x.view(panels, OUTPUTS, columns // 4, 4).transpose(1, 2)
        if code is not WeightCode.INT8:
            quads = quads[:, ::2] | (quads[:, 1::2] << 4)
    return empty(quads.shape, quads.dtype).copy_(quads).view(panels, -1)


def _by_panel(x: Tensor) -> Tensor:
    """Rearrange [out, groups] into [panels, groups, 16]."""
    x = functional.pad(x, (0, 0, 0, -x.shape[0] % OUTPUTS))
    return x.view(-1, OUTPUTS, x.shape[1]).transpose(1, 2).contiguous()
