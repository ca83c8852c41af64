"""The clip of 2-bit groups with the least squared error on observed rows."""

from torch import Tensor

from kvq.formats import KVFormat
from kvq.kernels.codec import decode, encode, rotate

CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)


def best_clip(rows: Tensor, fmt: KVFormat) -> float:
    """The clip among `CLIPS` whose decoded rows lie nearest to `rows`, fp32 [tokens, kv_heads, dim].

    Few levels over the whole range leave large steps for the many elements near the middle; for normally
    distributed elements four levels serve best over about two thirds of a group's range.
    Source: Max 1960, Quantizing for minimum distortion, for the trade.
    """
    target = rotate(rows) if fmt.rotated else rows  # decoded rows are rotated still, and distances the same

    def error(clip: float) -> float:
        decoded = decode(*encode(rows, fmt, clip=clip), fmt)
        return float((decoded - target).square().double().sum())

    return min(CLIPS, key=error)
