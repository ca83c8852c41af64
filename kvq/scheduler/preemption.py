"""Preemption: selects the request to preempt when blocks run out."""

from collections.abc import Iterable

from kvq.blockmgr import BlockManager
from kvq.scheduler.costs import CostModel
from kvq.scheduler.request import Branch, Request
from kvq.scheduler.running import Running


def resume_s(request: Request, manager: BlockManager, costs: CostModel) -> float:  # D406
    """Return the time to resume a request after a preemption. Tokens shared by several branches count once.

    Tokens are computed again, or come back from host memory if that takes less time: those of whole blocks,
    before the last snapshot of recurrent states, and, if there are several branches, of the prompt.
    """
    sequences = [branch.sequence for branch in request.live if branch.sequence is not None]
    depth = max((sequence.length for sequence in sequences), default=0)
    shared, token_s = min(request.prompt_length, depth), costs.prefill_token_s(depth)
    own = sum(max(0, sequence.length - request.prompt_length) for sequence in sequences)
    computed_s, tiers, states = (shared + own) * token_s, manager.blocks.tiers, manager.blocks.states
    whole = manager.block_size if states is None else states.every
    kept = (depth if len(request.live) == 1 else shared) // whole * whole
    if not kept or tiers is None or not tiers.host_bytes or tiers.groups is not None:
        return computed_s
    moved_s = costs.move_s(sequences[0].num_held * kept // depth)
    return computed_s - max(0.0, kept * token_s - moved_s)


def may_preempt(branch: Branch, running: Running, *, is_decode: bool) -> list[Request]:
    """Return the requests that a branch may preempt."""
    requests = running.requests
    after = min(request.place for request in requests) if is_decode else branch.request.place
    return [request for request in requests if request.place > after]


# D231: the oldest request is never preempted
def choose_victim(candidates: Iterable[Request], manager: BlockManager, costs: CostModel) -> Request | None:
    """Return the request that is cheapest to resume among those of the lowest priority.

    Each earlier preemption doubles a request's cost, to avoid choosing the same request every time.
    """

    def loss(request: Request) -> tuple[int, float, int]:
        cost = resume_s(request, manager, costs)
        return -request.priority, cost * 2.0 ** min(request.preemptions, 30), -request.place

    return min(candidates, key=loss, default=None)
