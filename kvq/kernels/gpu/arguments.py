"""Arguments of Triton kernels: K or V of a layer as one value, and strides of dense tensors.

Triton specializes every field of a tuple as it does loose arguments; None and constants are no arguments of
what is compiled. `do_not_specialize` does not reach into tuples, so numbers that vary stay outside of them.
Device code can't assign a tuple that holds a dtype to a name: it reads `k.read.compute` where it needs it.
"""

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.formats import Grouped, KVFormat, mean_format
from kvq.kernels.codec import hadamard_block
from kvq.kernels.gpu.rows import kind_of
from kvq.kernels.gpu.words import plain
from kvq.kernels.paged import PagedKV, PagedRows


class Strides(NamedTuple):
    """Elements from one block, head or token of a block to the next."""

    block: Any
    head: Any
    slot: Any = 0

    @classmethod
    def of(cls, rows: Tensor | None) -> "Strides":
        """Return those of [num_blocks, heads, slots, ...], or zeros without a tensor."""
        return cls(0, 0, 0) if rows is None else cls(*rows.stride()[:3])


class Reading(NamedTuple):
    """Constants by which attention reads K or V."""

    words: Any  # whether codes are read as words of two bytes
    run: Any  # bytes of a row that are read together
    width: Any  # columns of a run's words, padded
    pairs: Any  # columns of a row's minimums, padded
    paired: Any  # whether the scales of two neighbouring tokens are read as one word
    compute: Any  # dtype of products
    rounded: Any = False  # whether queries are rounded to K's codes

    @classmethod
    def one_by_one(cls, compute: tl.dtype) -> "Reading":
        """Return what it takes to read codes as they lie."""
        return cls(words=False, run=0, width=0, pairs=0, paired=False, compute=compute)


class Rows(NamedTuple):
    """K or V of a layer as kernels take it. Without scales, `scales` is a pointer that is not read."""

    codes: Any
    scales: Any  # scale and minimum of a group are one word, of 16 bits if narrow: the scale in its low half
    static: Any  # None without static scales
    means: Any  # None without means of blocks
    code_strides: Strides
    scale_strides: Strides
    mean_strides: Strides
    kind: Any  # constants from here on
    bits: Any
    dim: Any
    pad: Any  # the power of two from `dim` on
    group: Any
    rotated: Any  # elements of a rotated block; 1: not rotated
    mean_group: Any  # 0 without means
    cut: Any  # the part of a group's range at either end that its codes don't span
    read: Reading | None = None

    def with_codes(self, codes: Tensor) -> "Rows":
        """Return them with another view of the codes."""
        return self._replace(codes=codes, code_strides=Strides.of(codes))

    def with_scales(self, scales: Tensor) -> "Rows":
        """Return them with another view of the scales."""
        return self._replace(scales=scales, scale_strides=Strides.of(scales))

    def argument(self, *, constant_slots: bool = False) -> "Rows":
        """Return the value that a kernel is launched with, in which Triton can tell constants.

        `constant_slots`: strides between tokens are constants, too.
        """
        at, end = self._fields.index("kind"), self._fields.index("read")
        constants = {name: tl.constexpr(getattr(self, name)) for name in self._fields[at:end]}
        codes, scales, means = self.code_strides, self.scale_strides, self.mean_strides
        if constant_slots:
            codes = codes._replace(slot=tl.constexpr(codes.slot))
            scales = scales._replace(slot=tl.constexpr(scales.slot))
        means = means._replace(slot=tl.constexpr(0))
        if self.means is None:
            means = Strides(*map(tl.constexpr, means))
        read = None if self.read is None else Reading(*map(tl.constexpr, self.read))
        strides = {"code_strides": codes, "scale_strides": scales, "mean_strides": means}
        return self._replace(**strides, **constants, read=read)


def kernel_rows(part: Literal["k", "v"], kv: PagedKV) -> Rows:
    """Return K or V of a layer as its blocks store it; strides are in elements."""
    rows: PagedRows = getattr(kv, part)
    fmt: KVFormat = getattr(kv.formats, part)
    dim: int = getattr(kv.formats, f"{part}_head_dim")
    clip: float = getattr(kv.formats, f"{part}_clip")
    scales = rows.codes
    if rows.scales is not None:
        word = torch.int16 if fmt.is_narrow else torch.int32
        scales = rows.scales.view(word) if isinstance(fmt.scale, Grouped) else rows.scales
    mean_scale = mean_format(dim).scale
    assert isinstance(mean_scale, Grouped), "means are grouped"
    return Rows(
        codes=rows.codes,
        scales=scales,
        static=rows.static_scale,
        means=rows.means,
        code_strides=Strides.of(rows.codes),
        scale_strides=Strides.of(None if rows.scales is None else scales),
        mean_strides=Strides(*((0, 0) if rows.means is None else rows.means.stride()[:2])),
        kind=kind_of(fmt),
        bits=fmt.code.bits,
        dim=dim,
        pad=triton.next_power_of_2(dim),
        group=fmt.scale.group_size if isinstance(fmt.scale, Grouped) else dim,
        rotated=hadamard_block(dim) if fmt.rotated else 1,
        mean_group=0 if rows.means is None else mean_scale.group_size,
        cut=(1 - clip * fmt.span) / 2,
    )


def written_rows(part: Literal["k", "v"], kv: PagedKV) -> Rows:
    """Return K or V of a layer to be written; bf16 codes are integers, since the interpreter can't cast to
    bf16."""
    rows = kernel_rows(part, kv)
    if rows.codes.dtype is not torch.bfloat16:
        return rows
    bits = rows.codes.view(torch.int16)
    return rows._replace(codes=bits, scales=bits if rows.scales is rows.codes else rows.scales)


def dense_strides(name: str, x: Tensor) -> dict[str, int]:
    """Return the strides of [tokens, heads, dim], in elements, by the names of arguments."""
    return dict(zip((f"{name}_token", f"{name}_head", f"{name}_dim"), x.stride(), strict=True))


def opened(value: Any) -> Any:
    """Return a kernel's argument with plain constants, which is how the interpreter has loose ones."""
    return type(value)(*map(opened, value)) if isinstance(value, tuple) else plain(value)


opened.__triton_builtin__ = True  # type: ignore[attr-defined]  # else device code may not name it
