"""Weights of Linear layers, in the form that kernels, quantizers and file formats exchange."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from kvq.formats.ggml import GgmlType
from kvq.formats.weights import WeightCode, WeightFormat
from kvq.kernels.codec import e4m3
from kvq.kernels.codec.ggml import dequantize as dequantize_blocks

_NIBBLE_OFFSET = 8
_ROWS = 256  # compared at a time


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedWeight:
    """w[o, i] = (q[o, i] - zero[o, g]) * scale[o, g], where g is the group of input i.

    `codes`: for INT8, int8 [out, in]; for INT4 and INT3, uint8 [out, in / 2], where byte i contains q + 8 of
    inputs 2i (low nibble) and 2i + 1; for FP8, uint8 [out, in], E4M3FN bytes. `scale`: fp32, bf16 or fp16
    [out, groups]. `zero`: int8 [out, groups], None if symmetric. `order`: int64 [in]; column j of the codes
    belongs to input order[j], so groups are always adjacent columns. None: original order.
    """

    fmt: WeightFormat
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    order: Tensor | None = None

    @classmethod
    def pack(
        cls,
        fmt: WeightFormat,
        q: Tensor,
        scale: Tensor,
        zero: Tensor | None = None,
        order: Tensor | None = None,
    ) -> "QuantizedWeight":
        """Pack integer codes int8 [out, in] (FP8: uint8 E4M3FN bytes), with columns in group order."""
        codes = pack_nibbles(q) if fmt.code in (WeightCode.INT4, WeightCode.INT3) else q.contiguous()
        return cls(fmt=fmt, codes=codes, scale=scale, zero=zero, order=order)

    @classmethod
    def joined(cls, weights: Sequence["QuantizedWeight"]) -> "QuantizedWeight":
        """Concatenate weights of the same format for the same inputs in the same order."""
        first = weights[0]
        zeros = [weight.zero for weight in weights if weight.zero is not None]
        assert len(zeros) in (0, len(weights)), "all weights of a format have zero points, or none"
        return cls(
            fmt=first.fmt,
            codes=torch.cat([weight.codes for weight in weights]),
            scale=torch.cat([weight.scale for weight in weights]),
            zero=torch.cat(zeros) if zeros else None,
            order=first.order,
        )

    def has_order_of(self, other: "QuantizedWeight") -> bool:
        """Return True if the columns of both weights belong to the same inputs, in the same order."""
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)

    @property
    def out_features(self) -> int:
        """Number of output rows."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Number of inputs."""
        return self.codes.shape[1] * (2 if self.fmt.code in (WeightCode.INT4, WeightCode.INT3) else 1)

    @property
    def nbytes(self) -> int:
        """Size in bytes of codes, scales, zero points and input order."""
        return sum(x.nbytes for x in (self.codes, self.scale, self.zero, self.order) if x is not None)

    def integers(self) -> Tensor:
        """Return the codes q as int8 [out, in], with columns in group order; not for FP8."""
        return self.codes if self.fmt.code is WeightCode.INT8 else unpack_nibbles(self.codes)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight [out, in] in `dtype`, by default the scale's, with inputs in original order.

        The scale is converted to `dtype`, then (q - zero) and its product with the scale are rounded to
        `dtype`, as in compressed-tensors; in fp32, the rounding errors are negligible.
        """
        groups, scale = self.scale.shape[1], self.scale.to(dtype or self.scale.dtype)
        if self.fmt.code is WeightCode.FP8:
            q = e4m3.decode(self.codes).to(scale.dtype)  # E4M3 values are bf16 and fp16 values
        else:
            q = self.integers().to(scale.dtype)
        q = q.view(self.out_features, groups, -1)
        if self.zero is not None:
            q = q - self.zero.to(q.dtype)[:, :, None]
        weight = (q * scale[:, :, None]).flatten(1)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def to(self, device: torch.device) -> "QuantizedWeight":
        """Return the weight on another device."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return replace(self, **{name: x.to(device) for name, x in tensors.items() if x is not None})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockWeight:
    """A weight as a GGUF file stores it: uint8 [out, bytes of a row]."""

    fmt: GgmlType
    rows: Tensor
    is_mapped: bool = False  # rows are pages of a file, which packing may drop from memory

    @property
    def out_features(self) -> int:
        """Number of output rows."""
        return self.rows.shape[0]

    @property
    def in_features(self) -> int:
        """Number of inputs."""
        return self.rows.shape[1] // self.fmt.nbytes * self.fmt.values

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.rows.nbytes

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight [out, in] in `dtype`, by default fp32."""
        return dequantize_blocks(self.rows, self.fmt).to(dtype or torch.float32)

    def to(self, device: torch.device) -> "BlockWeight":
        """Return the weight on another device."""
        rows = self.rows.to(device)
        return replace(self, rows=rows, is_mapped=self.is_mapped and rows is self.rows)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlainWeight:
    """An unquantized weight: fp32, bf16 or fp16 [out, in], multiplied in fp32."""

    values: Tensor

    @classmethod
    def narrowest(cls, values: Tensor) -> "PlainWeight":
        """Return the weight in a 16-bit dtype if that is exact; many fp32 checkpoints were 16-bit."""
        if values.dtype is torch.float32:
            for dtype in (torch.bfloat16, torch.float16):
                if all(torch.equal(some.to(dtype).float(), some) for some in values.split(_ROWS)):
                    return cls(values=values.to(dtype))
        return cls(values=values)

    @property
    def out_features(self) -> int:
        """Number of output rows."""
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        """Number of inputs."""
        return self.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.values.nbytes


Weight = QuantizedWeight | BlockWeight | PlainWeight


def pack_nibbles(q: Tensor) -> Tensor:
    """Pack int8 [..., n] in [-8, 7] into uint8 [..., n / 2]: q + 8 of element 2i in byte i's low half."""
    u = (q + _NIBBLE_OFFSET).to(torch.uint8)
    return u[..., ::2] | (u[..., 1::2] << 4)


def unpack_nibbles(codes: Tensor) -> Tensor:
    """Unpack uint8 [..., n / 2] into int8 [..., n]; inverse of `pack_nibbles`."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8) - _NIBBLE_OFFSET
