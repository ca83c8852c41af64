"""Closed form for many identical decode steps, used by simulations, which know all tokens in advance."""

from array import array
from collections.abc import Sequence

from kvq.scheduler.request import Branch
from kvq.scheduler.running import held
from kvq.scheduler.scheduler import Scheduler


def is_settled(scheduler: Scheduler) -> bool:
    """Return True if the next steps repeat the last one until a request arrives, ends or becomes urgent.

    In that case, no waiting request can start, and no block turns out to be cached already.
    """
    config = scheduler.config
    if len(scheduler.waiting) and (not scheduler.nobody_fits or config.itl_slo_s is not None):
        return False
    leads, active = scheduler.manager.prefixes.leads, scheduler.running.active
    return not config.prefix_caching or all(leads(held(branch)) for branch in active)


# D235: only simulations know all tokens in advance
def repeat(scheduler: Scheduler, branches: Sequence[Branch], tokens: Sequence["array[int]"]) -> None:
    """Plan and commit several decode steps at once. `tokens` has the same number per branch.

    `is_settled` must be True for all these steps.

    Raises:
        OutOfBlocks: the tokens don't fit; nothing was changed.
    """
    count, manager = len(tokens[0]), scheduler.manager
    manager.extend([(held(branch), count) for branch in branches])
    caching = scheduler.config.prefix_caching
    for branch, new in zip(branches, tokens, strict=True):
        branch.tokens.extend(new)
        manager.commit(held(branch), new if caching else None)
    scheduler.counters.steps += count
