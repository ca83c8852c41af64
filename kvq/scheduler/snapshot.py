"""Scheduler snapshot: counts of requests, tokens and blocks, taken between two steps, as plain data."""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from kvq.blockmgr import PoolUsage
from kvq.scheduler.request import Request
from kvq.scheduler.running import Running
from kvq.scheduler.waiting_queue import WaitingQueue


@dataclass(kw_only=True, slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    added: int = 0
    ended: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # of admitted requests
    cached_tokens: int = 0  # of these, found in the prefix index
    misses: Counter[str] = field(default_factory=Counter)  # requests, by the cause of their prefix miss
    drafts: int = 0  # number of (step, sequence) pairs with drafts
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of these, confirmed by the model

    def admit(self, request: Request) -> None:
        """Count a request's prompt when the request gets its first blocks."""
        self.prompt_tokens += request.prompt_length
        self.cached_tokens += request.cached_tokens
        if request.miss is not None:
            self.misses[request.miss.cause] += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Counts of requests, tokens and blocks; totals are since the start."""

    running: int  # requests with blocks
    sequences: int = 0  # their branches
    waiting: int
    preempted: int
    held_up: int = 0  # waiting or preempted for reasons other than rows or order
    queued_tokens: int  # prompt tokens of waiting requests
    preemptions: int  # total
    prompt_tokens: int  # total
    cached_tokens: int  # of these, found in the prefix index
    misses: dict[str, int] = field(default_factory=dict)  # requests by the cause of their miss, total
    drafts: int = 0  # number of (step, sequence) pairs with drafts, total
    drafted_tokens: int = 0  # total
    accepted_tokens: int = 0  # of these, confirmed by the model
    pools: list[PoolUsage]  # by layer group

    def known(self) -> dict[str, Any]:
        """Return the fields as keyword arguments for an extended snapshot."""
        return {one.name: getattr(self, one.name) for one in fields(Snapshot)}


def take_snapshot(counters: Counters, running: Running, waiting: WaitingQueue, *, held_up: int) -> Snapshot:
    """Return a snapshot of the scheduler's state."""
    return Snapshot(
        running=len(running.requests),
        sequences=running.num_sequences,
        waiting=waiting.num_waiting,
        preempted=len(waiting.preempted),
        held_up=held_up,
        queued_tokens=sum(request.prompt_length for request in waiting.queue),
        preemptions=counters.preemptions,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        misses=dict(counters.misses),
        drafts=counters.drafts,
        drafted_tokens=counters.drafted_tokens,
        accepted_tokens=counters.accepted_tokens,
        pools=running.manager.usage(),
    )
