"""One layer's blocks as arguments of the Triton kernels."""

from typing import Any

import torch
import triton
from torch import Tensor

from kvq.formats import Grouped, KVFormat
from kvq.kernels.codec import hadamard_block
from kvq.kernels.gpu.kinds import kind_of
from kvq.kernels.paged import PagedKV, PagedRows


def part_arguments(prefix: str, kv: PagedKV) -> dict[str, Any]:
    """Pointers, strides (elements) and constants of K or V, named with `prefix`, "k" or "v"."""
    rows: PagedRows = getattr(kv, prefix)
    fmt: KVFormat = getattr(kv.formats, prefix)
    dim: int = getattr(kv.formats, f"{prefix}_head_dim")
    scales = rows.codes  # a pointer that is not read
    if rows.scales is not None:
        # A group's scale and minimum are one 32-bit word: the scale in its low half.
        scales = rows.scales.view(torch.int32) if isinstance(fmt.scale, Grouped) else rows.scales
    strides = (0, 0, 0) if rows.scales is None else scales.stride()[:3]
    static = rows.codes if rows.static_scale is None else rows.static_scale
    upper = prefix.upper()
    return {
        f"{prefix}_codes": rows.codes,
        f"{prefix}_scales": scales,
        f"{prefix}_static": static,
        **_strides(f"{prefix}c", rows.codes.stride()[:3]),
        **_strides(f"{prefix}s", strides),
        f"{upper}_KIND": kind_of(fmt.code),
        f"{upper}_BITS": fmt.code.bits,
        f"{upper}_DIM": dim,
        f"{upper}_PAD": triton.next_power_of_2(dim),
        f"{upper}_GROUP": fmt.scale.group_size if isinstance(fmt.scale, Grouped) else dim,
        f"{upper}_ROTATED": hadamard_block(dim) if fmt.rotated else 1,  # the block; 1: not rotated
        f"{upper}_STATIC": rows.static_scale is not None,
    }


def _strides(name: str, strides: Any) -> dict[str, int]:
    return dict(zip((f"{name}_block", f"{name}_head", f"{name}_slot"), strides, strict=True))


def dense_strides(name: str, x: Tensor) -> dict[str, int]:
    """Strides of [tokens, heads, dim], in elements."""
    return dict(zip((f"{name}_token", f"{name}_head", f"{name}_dim"), x.stride(), strict=True))
