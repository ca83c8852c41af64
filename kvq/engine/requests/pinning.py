"""Prefix pinning: keeps prompt prefixes cached for a limited time even if memory is needed."""

from kvq.blockmgr import BlockManager
from kvq.engine.params import PrefixPin
from kvq.engine.requests.request_state import Job
from kvq.errors import OutOfBlocks
from kvq.scheduler.request import RequestState


class Pinning:
    """Pins of prompt prefixes, each set once its prefix is computed.

    A pin beyond the limit for pins is refused, but its request is still served.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._waiting: list[Job] = []  # jobs with prefixes that are not pinned yet
        self.num_refused = 0  # number of refused pins since the start

    def add(self, job: Job) -> None:
        """Register a queued job."""
        if job.pins:
            self._waiting.append(job)

    def apply(self, now: float) -> None:
        """Pin the prefixes that have been computed so far."""
        for job in tuple(self._waiting):
            if job.state is not RequestState.ENDED:
                self._pin_computed(job, now)
            if not job.pins or job.state is RequestState.ENDED:
                self._waiting.remove(job)

    def _pin_computed(self, job: Job, now: float) -> None:
        sequence = job.branches[0].sequence  # the first branch computes the prompt
        if sequence is None:
            return
        computed = sequence.committed // self._manager.block_size
        while job.pins and job.pins[0].length // self._manager.block_size <= computed:
            self._pin(job, job.pins.pop(0), now)

    def _pin(self, job: Job, pin: PrefixPin, now: float) -> None:
        request = job
        prompt = self._manager.prompt(
            request.keyed(request.tokens[: pin.length]),
            tenant=request.tenant,
            shared_salt=request.shared_salt,
            cache_salt=request.cache_salt,
        )
        try:
            pinned = self._manager.pin(prompt, now + pin.seconds)
        except OutOfBlocks:
            self.num_refused += 1
        else:
            job.pinned_tokens = max(job.pinned_tokens, pinned)
