"""Where the scheduler stands between two steps, as plain data."""

from dataclasses import dataclass, fields
from typing import Any

from kvq.blockmgr import PoolUsage


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
    drafts: int = 0  # steps of sequences that had drafts
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of these, what the model would have said


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
    drafts: int = 0  # steps of sequences that had drafts, total
    drafted_tokens: int = 0  # total
    accepted_tokens: int = 0  # of these, what the model would have said
    pools: list[PoolUsage]  # per layer group

    def known(self) -> dict[str, Any]:
        """What it knows, for one that knows more."""
        return {field.name: getattr(self, field.name) for field in fields(Snapshot)}
