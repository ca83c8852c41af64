"""How many replicas a load needs."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from kvq.errors import ConfigError

MOST_REPLICAS = 1024
_IDLE = 0.5  # utilization below which more replicas don't help those who wait


def fewest_replicas(run: Callable[[int], dict[str, Any]], share: float) -> tuple[int, dict[str, Any]]:
    """The fewest replicas with which that share of the requests keeps the SLO, and their figures.

    `run` serves the load with so many. They are doubled until it does, then halved in between: more
    replicas are taken to be no worse.

    Raises:
        ConfigError: not even `MOST_REPLICAS` do, or no request can be served at all.
    """
    if not 0 < share <= 1:
        raise ConfigError(
            f"the share of requests that keep the SLO must be above 0 and at most 1, got {share}"
        )
    tried: dict[int, dict[str, Any]] = {}

    def met(number: int) -> float:
        if number not in tried:
            tried[number] = run(number)
        return tried[number]["slo_met"] or 0.0

    def enough(number: int) -> bool:
        return met(number) >= share

    high = 1
    while not enough(high):
        is_idle = tried[high]["utilization"] < _IDLE
        is_hopeless = high > 1 and is_idle and met(high) <= met(high // 2)
        if high >= MOST_REPLICAS or is_hopeless:
            raise ConfigError(
                f"{high} replicas keep the SLO for {100 * met(high):.1f}% of the requests, "
                f"{100 * share:g}% are asked for, and more don't help; loosen the SLO, or use a faster GPU"
            )
        high = min(MOST_REPLICAS, 2 * high)
    between = range(high // 2 + 1, high)
    found = (*between, high)[bisect_left(between, True, key=enough)]
    return found, tried[found]
