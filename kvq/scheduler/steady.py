"""Many equal steps at once, for simulations, which know all tokens beforehand."""

from array import array
from collections.abc import Sequence

from kvq.scheduler.holders import held
from kvq.scheduler.request import Branch
from kvq.scheduler.scheduler import Scheduler


def is_settled(scheduler: Scheduler) -> bool:
    """True if the next steps will be as the last one was, until somebody comes, ends or has waited long.

    Then nobody waits, or nobody who waits can be let in, and no block turns out to be there already.
    """
    config = scheduler.config
    if len(scheduler.lines) and (not scheduler.nobody_fits or config.itl_slo_s is not None):
        return False
    leads, active = scheduler.manager.prefixes.leads, scheduler.holders.active
    return not config.prefix_caching or all(leads(held(branch)) for branch in active)


def repeat(scheduler: Scheduler, branches: Sequence[Branch], tokens: Sequence["array[int]"]) -> None:
    """Several steps of decodes at once: each branch gets its tokens, all of them equally many.

    As if every step had been planned and committed, where `is_settled` holds throughout.

    Raises:
        OutOfBlocks: they don't fit; nothing changed.
    """
    count, manager = len(tokens[0]), scheduler.manager
    manager.extend([(held(branch), count) for branch in branches])
    caching = scheduler.config.prefix_caching
    for branch, new in zip(branches, tokens, strict=True):
        branch.tokens.extend(new)
        manager.commit(held(branch), new if caching else None)
    scheduler.counters.steps += count
