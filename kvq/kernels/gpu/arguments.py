"""A layer's blocks, and dense tensors, as the arguments that Triton kernels take."""

from typing import Any

import torch
import triton
from torch import Tensor

from kvq.formats import Grouped, KVFormat, mean_format
from kvq.kernels.codec import hadamard_block
from kvq.kernels.gpu.rows import kind_of
from kvq.kernels.paged import PagedKV, PagedRows


def part_arguments(part: str, kv: PagedKV, *, prefix: str | None = None) -> dict[str, Any]:
    """Pointers, strides (elements) and constants of K or V: `part` is "k" or "v", which names begin with.

    `prefix`: what they begin with instead, for kernels that take one of both.
    """
    rows: PagedRows = getattr(kv, part)
    fmt: KVFormat = getattr(kv.formats, part)
    dim: int = getattr(kv.formats, f"{part}_head_dim")
    of = part if prefix is None else prefix
    scales = rows.codes  # a pointer that is not read
    if rows.scales is not None:
        # A group's scale and minimum are one word, of 16 bits if narrow: the scale in its low half.
        word = torch.int16 if fmt.is_narrow else torch.int32
        scales = rows.scales.view(word) if isinstance(fmt.scale, Grouped) else rows.scales
    strides = (0, 0, 0) if rows.scales is None else scales.stride()[:3]
    static = rows.codes if rows.static_scale is None else rows.static_scale
    lower = f"{of}_" if of else ""
    upper = lower.upper()
    return {
        f"{lower}codes": rows.codes,
        f"{lower}scales": scales,
        f"{lower}static": static,
        **_strides(f"{of}c", rows.codes.stride()[:3]),
        **_strides(f"{of}s", strides),
        f"{upper}KIND": kind_of(fmt),
        f"{upper}BITS": fmt.code.bits,
        f"{upper}DIM": dim,
        f"{upper}PAD": triton.next_power_of_2(dim),
        f"{upper}GROUP": fmt.scale.group_size if isinstance(fmt.scale, Grouped) else dim,
        f"{upper}ROTATED": hadamard_block(dim) if fmt.rotated else 1,  # the block; 1: not rotated
        f"{upper}STATIC": rows.static_scale is not None,
    }


def mean_arguments(part: str, kv: PagedKV, *, prefix: str | None = None) -> dict[str, Any]:
    """Means of K's or V's blocks as arguments, named as `part_arguments` does; MEAN_GROUP 0: none."""
    rows: PagedRows = getattr(kv, part)
    of = part if prefix is None else prefix
    lower = f"{of}_" if of else ""
    scale = mean_format(getattr(kv.formats, f"{part}_head_dim")).scale
    assert isinstance(scale, Grouped), "means are grouped"
    strides = (0, 0) if rows.means is None else rows.means.stride()[:2]
    return {
        f"{lower}means": rows.codes if rows.means is None else rows.means,  # or a pointer that is not read
        f"{of}m_block": strides[0],
        f"{of}m_head": strides[1],
        f"{lower.upper()}MEAN_GROUP": 0 if rows.means is None else scale.group_size,
    }


def _strides(name: str, strides: Any) -> dict[str, int]:
    return dict(zip((f"{name}_block", f"{name}_head", f"{name}_slot"), strides, strict=True))


def dense_strides(name: str, x: Tensor) -> dict[str, int]:
    """Strides of [tokens, heads, dim], in elements."""
    return dict(zip((f"{name}_token", f"{name}_head", f"{name}_dim"), x.stride(), strict=True))
