"""Where the scheduler stands between two steps, as plain data."""

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from kvq.blockmgr import PoolUsage
from kvq.scheduler.holders import Holders
from kvq.scheduler.lines import Lines

T = TypeVar("T", bound="Snapshot")


@dataclass(kw_only=True, slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    added: int = 0
    ended: int = 0
    swaps: int = 0  # preemptions by swapping out
    recomputes: int = 0  # preemptions whose tokens are computed again
    prompt_tokens: int = 0  # of admitted requests
    cached_tokens: int = 0  # of these, found in the prefix index


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Counts of requests, tokens and blocks; totals are since the start."""

    running: int  # requests with blocks
    sequences: int = 0  # their branches
    waiting: int
    preempted: int
    held_up: int = 0  # of those that wait or were preempted: for something else than a seat or their turn
    queued_tokens: int  # prompt tokens of requests that wait
    preemptions: int  # total
    prompt_tokens: int  # total
    cached_tokens: int  # of these, found in the prefix index
    pools: list[PoolUsage]  # per layer group

    @classmethod
    def of(
        cls, counters: Counters, holders: Holders, lines: Lines, held_up: int, pools: list[PoolUsage]
    ) -> "Snapshot":
        """Where a scheduler's parts stand."""
        return cls(
            running=len(holders.running),
            sequences=holders.num_sequences,
            waiting=lines.num_waiting,
            preempted=len(lines.preempted),
            held_up=held_up,
            queued_tokens=sum(request.prompt_length for request in lines.queue),
            preemptions=counters.swaps + counters.recomputes,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            pools=pools,
        )

    def as_part_of(self, kind: type[T], **more: Any) -> T:
        """A snapshot of a kind that knows more."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(Snapshot)}, **more)
