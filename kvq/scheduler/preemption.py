"""Who gives up blocks when they run out, and how."""

from collections.abc import Iterable

from kvq.blockmgr import BlockManager
from kvq.scheduler.costs import CostModel
from kvq.scheduler.request import Branch, Request


def recompute_s(request: Request, costs: CostModel) -> float:
    """Time to compute again what a request would lose; what branches share counts once."""
    branches = [branch.sequence for branch in request.live if branch.sequence is not None]
    own = sum(max(0, sequence.length - request.prompt_length) for sequence in branches)
    depth = max((sequence.length for sequence in branches), default=0)
    return (min(request.prompt_length, depth) + own) * costs.prefill_token_s(depth)


def swappable(request: Request, manager: BlockManager) -> Branch | None:
    """The only branch of a request that could be swapped out now.

    Forks are computed again instead: swapped one by one they would come back unshared.
    """
    live = request.live
    if len(live) != 1 or live[0].sequence is None or not live[0].sequence.ready:
        return None
    return live[0] if manager.swap.can_swap_out(live[0].sequence) else None


def swap_s(branch: Branch, costs: CostModel) -> float:
    """Time to move a branch's blocks out and in again."""
    assert branch.sequence is not None, "only a branch with blocks can be swapped"
    return costs.swap_s(branch.sequence.num_held)


def prefers_swap(branch: Branch, costs: CostModel) -> bool:
    """True if moving a branch out and in costs less than computing it again."""
    return swap_s(branch, costs) < recompute_s(branch.request, costs)


def choose_victim(candidates: Iterable[Request], manager: BlockManager, costs: CostModel) -> Request | None:
    """The request that loses least: of the lowest priority, cheapest to bring back.

    What a request was preempted before counts double each time, so that it is not always the same.
    """

    def loss(request: Request) -> tuple[int, float, int]:
        cost = recompute_s(request, costs)
        branch = swappable(request, manager)
        if branch is not None:
            cost = min(cost, swap_s(branch, costs))
        return -request.priority, cost * 2.0 ** min(request.preemptions, 30), -request.place

    return min(candidates, key=loss, default=None)
