"""The speculator that an engine was asked for."""

from collections.abc import Callable

from kvq.engine.choose import Chooser
from kvq.engine.runner import Runner
from kvq.engine.sampling.sampler import Sampler
from kvq.engine.speculation.config import Speculation
from kvq.engine.speculation.lookup import Lookup
from kvq.engine.speculation.proposer import Jobs, Proposer
from kvq.engine.speculation.speculator import Speculator
from kvq.models import Model
from kvq.scheduler import Scheduler


def make_speculator(
    config: Speculation | None,
    model: Model,
    scheduler: Scheduler,
    runner: Runner,
    sampler: Sampler,
    chooser: Chooser,
    jobs: Jobs,
    clock: Callable[[], float],
) -> Speculator | None:
    """None if none was asked for."""
    if config is None:
        return None
    proposer: Proposer = Lookup()
    return Speculator(config, proposer, scheduler, jobs, clock)
