"""Things that go wrong, at moments that a seed decides."""

import random
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from kvq.blockmgr import BlockManager, Sequence
from kvq.errors import ConfigError, OutOfBlocks
from kvq.scheduler import StepPlan
from kvq.tiers.tiers import Tiers
from tests.capacity.harness.answers import VOCABULARY

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """How probable each fault is: per step, unless said otherwise."""

    allocation: float = 0.0  # per call: no blocks for new tokens, although there are some
    slow_step: float = 0.0  # takes 10 to 100 times as long
    cancel: float = 0.0  # somebody cancels a request, wherever it is
    nan: float = 0.0  # KV or logits of one branch are not finite
    host_corruption: float = 0.0  # the bytes of a block in host memory are damaged
    preemption: float = 0.0  # a running request loses its blocks
    pin: float = 0.0  # somebody pins the prefix of a request's tokens
    hint: float = 0.0  # somebody says what should happen to a session

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) <= 1:
                raise ConfigError(
                    f"the probability of {field.name} must be 0 to 1, got {getattr(self, field.name)}"
                )


class Injector:
    """Decides which faults happen when. Without faults it decides nothing and draws no numbers."""

    def __init__(self, faults: Faults | None, seed: int) -> None:
        self.faults = faults or Faults()
        self.refusals = 0  # allocations that were made to fail
        self._rng = random.Random(f"faults:{seed}")

    def manager(self, **options: Any) -> BlockManager:
        """A block manager that refuses new tokens now and then."""
        if not self.faults.allocation:
            return BlockManager(**options)
        return _RefusingManager(self, **options)

    def happens(self, probability: float) -> bool:
        """True with that probability."""
        return probability > 0 and self._rng.random() < probability

    def one_of(self, some: list[T]) -> T | None:
        """Any of them, or None if there are none."""
        return some[int(self._rng.random() * len(some))] if some else None

    def slowness(self) -> float:
        """What a step's time is multiplied by."""
        return self._rng.uniform(10, 100) if self.happens(self.faults.slow_step) else 1.0

    def seconds(self, most: float) -> float:
        """Some time."""
        return self._rng.uniform(0, most)

    def num_drafts(self, most: int) -> int:
        """How many tokens to guess."""
        return int(self._rng.random() * (most + 1)) if most else 0

    def guess(self, token: int, share: float) -> int:
        """The token, or another one."""
        return token if self._rng.random() < share else int(self._rng.random() * VOCABULARY)

    def damage(self, tiers: Tiers | None) -> None:
        """Change the bytes of a block in host memory, if there is one."""
        held = None if tiers is None else self.one_of(list(tiers._host.values()))
        if held is not None:
            held.content = bytes(len(held.content))

    def bad(self, plan: StepPlan) -> set[int]:
        """Indices of branches whose values are not finite."""
        if not plan.branches or not self.happens(self.faults.nan):
            return set()
        return {int(self._rng.random() * len(plan.branches))}


class _RefusingManager(BlockManager):
    """Says now and then that there are no blocks for new tokens; then nothing changes."""

    def __init__(self, injector: Injector, **options: Any) -> None:
        super().__init__(**options)
        self._injector = injector

    def extend(self, work: list[tuple[Sequence, int]]) -> None:
        """As the block manager does, or refuse."""
        if work and self._injector.happens(self._injector.faults.allocation):
            self._injector.refusals += 1
            raise OutOfBlocks("an allocation was made to fail")
        super().extend(work)
