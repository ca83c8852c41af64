"""A step in the making, and the plan that it becomes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvq.blockmgr import BlockManager
from kvq.scheduler.holders import held
from kvq.scheduler.plan import StepPlan
from kvq.scheduler.request import Branch, Request
from kvq.scheduler.snapshot import Counters


@dataclass(slots=True, eq=False)
class Step:
    """What was decided so far."""

    now: float
    decodes: list[Branch] = field(default_factory=list)
    unfinished: list[Branch] = field(default_factory=list)  # prefills under way
    budget: int = 0  # prefill tokens left
    promised: int = 0  # blocks that prefills under way will still take
    prefills: list[tuple[Branch, int]] = field(default_factory=list)
    restored: list[Branch] = field(default_factory=list)

    def forget(self, request: Request) -> None:
        """Drop what was planned for a request that was preempted since, and starts anew."""
        self.decodes = [branch for branch in self.decodes if branch.request is not request]
        self.prefills = [(branch, count) for branch, count in self.prefills if branch.request is not request]


def pack(
    chosen: list[tuple[Branch, int]],
    num_decodes: int,
    manager: BlockManager,
    counters: Counters,
    *,
    restored: Sequence[Branch] = (),
    follows: list[int] | None = None,
) -> StepPlan:
    """The next step: branches and how many tokens each computes, which have their slots already."""
    plan = StepPlan(
        number=counters.steps,
        branches=[branch for branch, _ in chosen],
        num_decodes=num_decodes,
        counts=[count for _, count in chosen],
        orders=manager.take_orders(),
        restored=list(restored),
        follows=follows,
    )
    counters.steps += 1
    ends, samples, token_ids = plan.ends, plan.samples, plan.token_ids
    for i, (branch, count) in enumerate(chosen):
        sequence = held(branch)
        end = sequence.length
        ends.append(end)
        if follows is not None:
            samples.append(True)
            token_ids.append(0)
        else:
            samples.append((i < num_decodes or end == branch.goal) and branch.is_sampled)
            if count == 1:
                token_ids.append(branch.tokens[end - 1])
            else:
                token_ids.extend(branch.tokens[end - count : end])
        if sequence.is_changed:
            row = branch.row
            assert row is not None, "a branch with blocks has a row"
            plan.table_changes.extend((row, *change) for change in sequence.take_changes())
    return plan
