"""Timing helpers for benchmarks: percentiles, and the order of contenders."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def in_turn(contenders: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Yield (repeat, contender) for all contenders in each repeat, each time starting with the next one."""
    for repeat in range(repeats):
        for i in range(len(contenders)):
            yield repeat, contenders[(i + repeat) % len(contenders)]


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median of a figure and its 10th and 90th percentiles as `name`, `name_p10`, `name_p90`."""
    return {
        name: percentile(values, 50),
        f"{name}_p10": percentile(values, 10),
        f"{name}_p90": percentile(values, 90),
    }


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the value below which `percent` percent of `values` lie, with linear interpolation."""
    return float(np.percentile([*values], percent))
