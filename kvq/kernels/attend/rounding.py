"""Rounding of queries for 8-bit products: the largest code of K's formats that are multiplied as they lie."""

from torch import Tensor

from kvq.formats import Code, KVFormat
from kvq.kernels.codec import e4m3, rotate

_LARGEST = {Code.FP8: 448.0, Code.INT8: 127.0}  # codes of K, and the largest that one holds
_LEAST = 1e-30  # what a row's largest element counts as at least


def limit_of(fmt: KVFormat) -> float | None:
    """The largest that a code of K holds; None where products are not of its codes as they lie."""
    return None if fmt.is_per_channel else _LARGEST.get(fmt.code)


def rounded_queries(q: Tensor, fmt: KVFormat) -> Tensor:
    """q [..., dim] as codes of `fmt` with one scale a row hold it, fp32; of other codes as it is.

    If the format rotates, it is what is rotated that is rounded; it is turned back.
    """
    limit = limit_of(fmt)
    if limit is None:
        return q.float()
    y = rotate(q.float()) if fmt.rotated else q.float()
    top = y.abs().amax(dim=-1, keepdim=True).clamp(min=_LEAST)
    codes = y * (limit / top)
    held = e4m3.decode(e4m3.encode(codes)) if fmt.code is Code.FP8 else codes.round()
    held = held * (top / limit)
    return rotate(held) if fmt.rotated else held
