"""Fault injection at times determined by a seed: client disconnects, slow steps, and engine crashes."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf, log1p
from sys import maxsize

from kvq.capacity.fleet.arrivals import Call


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Rates of faults, and the seed that determines when they happen."""

    seed: int = 0
    leaving: float = 0.05  # share of requests whose clients disconnect during the answer
    slow_steps: float = 1e-3  # share of steps that take 10 to 100 times as long
    life_s: float = 300.0  # mean time until a replica's engine crashes and loses all requests
    restart_s: float = 30.0  # until its next engine is ready

    def visit(self, calls: Iterable[Call]) -> Iterator[Call]:
        """Yield the requests, some of them marked with an early disconnect of their client."""
        rng = random.Random(f"clients/{self.seed}")
        for call in calls:
            leaves = rng.random() < self.leaving and call.output_tokens > 1
            yield replace(call, kept_tokens=rng.randrange(1, call.output_tokens)) if leaves else call

    def of_replica(self, index: int) -> "_Trouble":
        """Return the upcoming faults of a replica."""
        return _Trouble(self, index)


NONE = Faults(leaving=0.0, slow_steps=0.0, life_s=inf)


class _Trouble:  # D284: engines crash; their requests are not sent again
    """Upcoming faults of one replica."""

    def __init__(self, faults: Faults, index: int) -> None:
        self._faults = faults
        self._rng = random.Random(f"replica/{faults.seed}/{index}")
        self.slow_step = self._draw_steps()  # number of the next slow step
        self.death_s = self._draw_life()

    def slowness(self) -> float:
        """Return the slowdown factor of a slow step, and sample the number of the next slow step."""
        self.slow_step += 1 + self._draw_steps()
        return self._rng.uniform(10, 100)

    def die(self, now: float) -> float:
        """Return the time at which the next engine is ready, and sample the time of its crash."""
        ready_s = now + self._faults.restart_s
        self.death_s = ready_s + self._draw_life()
        return ready_s

    def _draw_steps(self) -> int:
        """Sample the number of steps before the next slow step."""
        share = self._faults.slow_steps
        if share in (0, 1):
            return maxsize if share == 0 else 0
        return int(log1p(-self._rng.random()) / log1p(-share))

    def _draw_life(self) -> float:
        return self._faults.life_s * self._rng.expovariate(1)
