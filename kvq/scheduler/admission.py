"""Whether a request without blocks may start or come back beside those that run."""

from dataclasses import dataclass

from kvq.blockmgr import BlockManager, PrefixQuery
from kvq.scheduler.config import SchedulerConfig
from kvq.scheduler.costs import CostModel
from kvq.scheduler.fit import PoolShape
from kvq.scheduler.holders import Holders, held
from kvq.scheduler.request import Request
from kvq.scheduler.step import Step


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """Looks at blocks, rows and goals. Changes nothing."""

    manager: BlockManager
    config: SchedulerConfig
    costs: CostModel
    holders: Holders
    shape: PoolShape

    def num_blocks(self, tokens: int) -> int:
        """Blocks of full attention that so many tokens take."""
        return -(-tokens // self.shape.block_size)

    def taken(self, start: int, end: int) -> list[int]:
        """Blocks per layer group that a sequence takes from one length to another; none beyond a limit."""
        return [
            int(not start)
            if is_state
            else self.num_blocks(min(end, limit or end)) - self.num_blocks(min(start, limit or start))
            for _, limit, is_state in self.shape.reaches
        ]

    def promised(self, step: Step) -> list[int]:
        """Blocks per layer group that prefills under way will still take."""
        promised = [0] * len(self.shape.windows)
        for branch in step.unfinished:
            if branch.sequence is not None:
                promised = added(promised, self.taken(branch.sequence.length, branch.goal))
        return promised

    def has_seats(self, request: Request) -> bool:
        """True if its branches have rows, and steps would still keep the inter-token goal with them."""
        if not self.holders.has_rows(request):
            return False
        goal, running = self.config.itl_slo_s, self.holders.num_sequences
        return goal is None or not running or self.costs.decode_s(running + len(request.live)) <= goal

    def can_start(self, step: Step, request: Request, prompt: PrefixQuery, found: int) -> bool:
        """True if a prompt's first chunk fits and those that run can grow; `found`: tokens of its hit."""
        total = len(prompt.tokens)
        count = min(total - found, step.budget, request.max_chunk or total)
        promised = added(step.promised, self.taken(found + count, total))
        return self.manager.can_admit(prompt, count, spare=self._spare(request, promised))

    def can_swap_in(self, step: Step, request: Request) -> bool:
        """True if there is room for a swapped-out request's blocks and for growth."""
        sequence = held(request.live[0])
        need = [len(slots) for slots in sequence.swapped or []]
        pools = zip(self.manager.pools, need, self._spare(request, step.promised), strict=True)
        fits = all(pool.num_available >= blocks + left for pool, blocks, left in pools)
        return fits and self.manager.can_swap_in(sequence)

    def _spare(self, request: Request, promised: list[int]) -> list[int]:
        """Blocks per layer group that must be left over when a request starts.

        The reserve, and what it and others were promised. A request that was preempted also waits until
        running ones could grow by some blocks each, more after every preemption, or it would be
        preempted again at once. Alone it may have everything. A sequence in a layer group with a window
        takes one block at most before it gives one back.
        """
        if not self.holders.running:
            return [0] * len(self.shape.windows)
        running = self.holders.num_sequences if request.preemptions else 0
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
    """Blocks per layer group, together."""
    return [a + b for a, b in zip(some, more, strict=True)]
