"""Admission: decides whether a request without blocks may start or resume alongside running requests."""

from dataclasses import dataclass

from kvq.blockmgr import BlockManager, PrefixQuery
from kvq.scheduler.config import SchedulerConfig
from kvq.scheduler.costs import CostModel
from kvq.scheduler.fit import PoolShape
from kvq.scheduler.request import Request
from kvq.scheduler.running import Running
from kvq.scheduler.step import Step


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """Checks of a request's needs against free blocks, free rows and latency goals, without side effects."""

    manager: BlockManager
    config: SchedulerConfig
    costs: CostModel
    running: Running
    shape: PoolShape

    def num_blocks(self, tokens: int) -> int:
        """Return the number of full-attention blocks that `tokens` tokens need."""
        return -(-tokens // self.shape.block_size)

    def taken(self, start: int, end: int) -> list[int]:
        """Return the blocks per layer group that a sequence needs to grow from `start` to `end` tokens."""
        return [
            int(not start)
            if is_state
            else self.num_blocks(min(end, limit or end)) - self.num_blocks(min(start, limit or start))
            for _, limit, is_state in self.shape.reaches
        ]

    def promised(self, step: Step) -> list[int]:
        """Return the number of blocks per layer group that unfinished prefills will still need."""
        promised = [0] * len(self.shape.reaches)
        for branch in step.unfinished:
            if branch.sequence is not None:
                promised = added(promised, self.taken(branch.sequence.length, branch.goal))
        return promised

    def has_rows(self, request: Request) -> bool:
        """Return True if all branches get rows and the larger batch still meets the inter-token goal."""
        if not self.running.has_rows(request):
            return False
        goal, running = self.config.itl_slo_s, self.running.num_sequences
        return goal is None or not running or self.costs.decode_s(running + len(request.live)) <= goal

    def can_start(self, step: Step, request: Request, prompt: PrefixQuery, found: int) -> bool:
        """Return True if the first chunk fits and running requests can grow. `found`: cached tokens."""
        total = len(prompt.tokens)
        count = min(total - found, step.budget, request.max_chunk or total)
        promised = added(step.promised, self.taken(found + count, total))
        return self.manager.can_admit(prompt, count, spare=self._spare(request, promised))

    def _spare(self, request: Request, promised: list[int]) -> list[int]:
        """Return the number of blocks per layer group that must stay free when a request starts.

        These are the reserve and the promised blocks. A preempted request also waits until each running
        request could grow by some blocks (more after every preemption); otherwise, it would soon be preempted
        again. If no request is running, the new request may take all blocks. A sequence in a layer group with
        a window takes at most one block before it releases one.
        """
        if not self.running.requests:
            return [0] * len(self.shape.reaches)
        running = self.running.num_sequences if request.preemptions else 0
        growth = running << max(0, min(request.preemptions - 1, 8))
        spare = []
        for (window, limit, _), left in zip(self.shape.reaches, promised, strict=True):
            if window is not None:
                left = min(growth, running) + min(left, self.num_blocks(window) + 1)
            elif limit is None:
                left += growth
            spare.append(self.manager.reserve_blocks + left)
        return spare


def added(some: list[int], more: list[int]) -> list[int]:
    """Return the element-wise sum of two lists of counts per layer group."""
    return [a + b for a, b in zip(some, more, strict=True)]
