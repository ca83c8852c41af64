"""Preemption: selects the request to preempt when blocks run out, and decides whether to swap it out."""

from collections.abc import Iterable

from kvq.blockmgr import BlockManager
from kvq.scheduler.costs import CostModel
from kvq.scheduler.request import Branch, Request
from kvq.scheduler.running import Running


def recompute_s(request: Request, costs: CostModel) -> float:
    """Return the time to recompute a request's tokens. Tokens shared by several branches count once."""
    branches = [branch.sequence for branch in request.live if branch.sequence is not None]
    own = sum(max(0, sequence.length - request.prompt_length) for sequence in branches)
    depth = max((sequence.length for sequence in branches), default=0)
    return (min(request.prompt_length, depth) + own) * costs.prefill_token_s(depth)


def swappable(request: Request, manager: BlockManager) -> Branch | None:  # D230
    """Return the request's only branch if the branch can be swapped out now, or None otherwise.

    Forks are recomputed instead, since they would no longer share blocks if swapped one by one.
    """
    live = request.live
    if len(live) != 1 or live[0].sequence is None or not live[0].sequence.ready:
        return None
    return live[0] if manager.swap.can_swap_out(live[0].sequence) else None


def swap_s(branch: Branch, costs: CostModel) -> float:
    """Return the time to swap a branch's blocks out and back in."""
    assert branch.sequence is not None, "only a branch with blocks can be swapped"
    return costs.swap_s(branch.sequence.num_held)


def prefers_swap(branch: Branch, costs: CostModel) -> bool:
    """Return True if swapping a branch out and in takes less time than recomputing it."""
    return swap_s(branch, costs) < recompute_s(branch.request, costs)


def may_preempt(branch: Branch, running: Running, *, is_decode: bool) -> list[Request]:
    """Return the requests that a branch may preempt, excluding requests that are being swapped in."""
    requests, active = running.requests, running.active
    after = min(request.place for request in requests) if is_decode else branch.request.place
    return [r for r in requests if r.place > after and any(other in active for other in r.live)]


# D231: the oldest request is never preempted
def choose_victim(candidates: Iterable[Request], manager: BlockManager, costs: CostModel) -> Request | None:
    """Return the request that is cheapest to resume among those of the lowest priority.

    Each earlier preemption doubles a request's cost, to avoid choosing the same request every time.
    """

    def loss(request: Request) -> tuple[int, float, int]:
        cost = recompute_s(request, costs)
        branch = swappable(request, manager)
        if branch is not None:
            cost = min(cost, swap_s(branch, costs))
        return -request.priority, cost * 2.0 ** min(request.preemptions, 30), -request.place

    return min(candidates, key=loss, default=None)
