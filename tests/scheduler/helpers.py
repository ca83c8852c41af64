"""A scheduler over real block memory, and the smallest engine that can drive it."""

import itertools
from array import array
from typing import Any

from kvq.blockmgr import BlockManager, Demote
from kvq.errors import OutOfBlocks
from kvq.scheduler import FixedCosts, Request, Scheduler, SchedulerConfig, StepPlan
from kvq.tiers.tiers import Tiers

_fresh = itertools.count(1000, 1000)


class RefusingManager(BlockManager):
    """Refuses the allocations for new tokens that it is told to."""

    refuses: tuple[bool, ...] = ()  # the next ones, in order; all after them are left alone

    def extend(self, work: Any) -> None:
        """As the block manager does, or refuse."""
        if work and self.refuses:
            refused, *rest = self.refuses
            self.refuses = tuple(rest)
            if refused:
                raise OutOfBlocks("refused on purpose")
        super().extend(work)


def make(
    num_blocks: int = 64,
    *,
    block_size: int = 4,
    windows: tuple[int | None, ...] = (None,),
    limits: tuple[int | None, ...] | None = None,
    has_host: bool = False,
    costs: FixedCosts | None = None,
    **config: Any,
) -> Scheduler:
    """A scheduler whose pools have `num_blocks` each, above host memory for all that leaves them or not."""
    manager = RefusingManager(
        num_blocks=[num_blocks] * len(windows),
        block_size=block_size,
        windows=list(windows),
        limits=None if limits is None else list(limits),
    )
    if has_host:
        manager.blocks.tiers = Tiers(1 << 20, None)
    return Scheduler(manager, SchedulerConfig(**config), costs or FixedCosts())


def ask(length: int = 8, max_tokens: int | None = 4, *, first: int | None = None, **options: Any) -> Request:
    """A request whose prompt shares nothing with others, or starts with the token `first`."""
    start = next(_fresh) if first is None else first
    tokens = array("I", range(start, start + length))
    return Request(id=f"r{start}", tokens=tokens, max_tokens=max_tokens, **options)


def add(scheduler: Scheduler, *requests: Request, now: float = 0.0) -> None:
    """Queue requests in this order."""
    for request in requests:
        scheduler.add(request, now)


def commit(scheduler: Scheduler, plan: StepPlan) -> None:
    """Token 1 for every branch that wants one; branches end at their `max_tokens`."""
    forks = {
        branch.request: [(0, 1 + i) for i in range(branch.request.num_branches)]
        for branch, samples in zip(plan.branches, plan.samples, strict=True)
        if samples and not branch.request.is_forked
    }
    wanted = zip(plan.branches, plan.samples, strict=True)
    tokens = [[1] if samples and branch.request not in forks else [] for branch, samples in wanted]
    scheduler.commit(plan, tokens)
    for request, picks in forks.items():
        scheduler.branch_out(request, picks)
    for request in {branch.request: None for branch in plan.branches}:
        for branch in request.live:
            if branch.num_generated == request.max_tokens:
                scheduler.finish(branch)


def step(scheduler: Scheduler, now: float = 0.0) -> StepPlan | None:
    """One step, carried out and committed."""
    plan = scheduler.schedule(now)
    if plan is not None:
        for order in plan.orders:
            if isinstance(order, Demote):
                assert scheduler.manager.blocks.tiers is not None
                scheduler.manager.blocks.tiers.put(order.key, bytes(8), order.form)
        commit(scheduler, plan)
    return plan


def drain(scheduler: Scheduler, *, step_s: float = 0.01, most: int = 2000) -> int:
    """Step until nobody is left; returns how many steps it took."""
    for number in range(most):
        if not scheduler.has_work:
            scheduler.manager.check_integrity()
            return number
        step(scheduler, number * step_s)
    raise AssertionError(f"requests are left after {most} steps")
