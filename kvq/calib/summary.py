"""What calibration saw, as rows for people: ranges per head, outlier channels, biases."""

from dataclasses import dataclass

import torch

from kvq.calib.observe import Observations, RowStatistics

_OUTLIER = 4.0  # times the median channel's root mean square
_BIAS = 2.0  # standard deviations from zero, and times the median channel's root mean square


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSummary:
    """K or V of one KV head of one layer. Fields are the JSON keys of `kvq calibrate --json`."""

    layer: int
    part: str  # "k" or "v"
    head: int
    absmax: float
    p99: float  # magnitude that 99% of the elements do not exceed
    p999: float
    p9999: float
    clip_int8: float  # of least squared error for 8-bit symmetric codes
    absmax_rotated: float
    clip_int8_rotated: float
    outlier_channels: tuple[int, ...]  # root mean square of at least 4 times the median channel's
    biased_channels: tuple[int, ...]  # mean of 2 standard deviations, and of 2 median root mean squares
    largest_outlier: float  # times the median channel's root mean square
    largest_bias: float  # of channel means, in median root mean squares


def summarize(observations: Observations) -> list[HeadSummary]:
    """One row per layer, K or V, and head."""
    return [
        row
        for index, layer in enumerate(observations.layers)
        for part in ("k", "v")
        for row in _heads(index, part, layer[part])
    ]


def _heads(index: int, part: str, seen: RowStatistics) -> list[HeadSummary]:
    plain, rotated = seen.magnitudes, seen.rotated
    percentiles = [plain.percentile(share) for share in (0.99, 0.999, 0.9999)]
    clips, rotated_clips = plain.least_squares_clip(127), rotated.least_squares_clip(127)
    middle = seen.rms.median(dim=1, keepdim=True).values.clamp_min(1e-30)  # [heads, 1]
    outlying = seen.rms / middle
    bias = seen.mean.abs()
    is_biased = (bias >= _BIAS * seen.std) & (bias >= _BIAS * middle)
    return [
        HeadSummary(
            layer=index,
            part=part,
            head=head,
            absmax=float(plain.absmax[head]),
            p99=percentiles[0][head],
            p999=percentiles[1][head],
            p9999=percentiles[2][head],
            clip_int8=clips[head],
            absmax_rotated=float(rotated.absmax[head]),
            clip_int8_rotated=rotated_clips[head],
            outlier_channels=_where(outlying[head] >= _OUTLIER),
            biased_channels=_where(is_biased[head]),
            largest_outlier=float(outlying[head].max()),
            largest_bias=float((bias / middle)[head].max()),
        )
        for head in range(seen.rms.shape[0])
    ]


def _where(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero().flatten().tolist())
