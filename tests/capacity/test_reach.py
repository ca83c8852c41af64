"""The random runs reach every corner: each kind of request in each stage of its life is hit by each fault."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvq.blockmgr import BlockManager
from kvq.scheduler import Request, Scheduler
from kvq.scheduler.loading import Loading
from kvq.scheduler.request import RequestState
from kvq.scheduler.running import Running
from kvq.scheduler.waiting_queue import WaitingQueue
from kvq.tiers.tiers import Tiers
from tests.capacity.harness import Outcome, fuzz
from tests.capacity.harness.fake_engine import FakeEngine

STAGES = ["queued", "parked", "prefilling", "decoding", "branched", "preempted"]
PATHS = [
    *(f"cancelled while {stage}" for stage in STAGES), "parked", "forked", "forked again", "resumed",
    "loaded", "resumed with what was loaded", "damaged", "failed", "pinned", "given up", "refused",
    "packed_blocks", "loaded_tokens", "failed_loads", "damaged_blocks", "prefetched", "filled_from_pool",
    "filled_in_cold_form", "filled_in_own_form", "hints",
]  # fmt: skip


def stage(engine: FakeEngine, request: Request) -> str:
    """Where in its life a request is."""
    if request.state is RequestState.WAITING:
        lines = engine.scheduler.waiting
        return "queued" if request in lines.queue else "parked"
    if request.state is RequestState.PREEMPTED:
        return "preempted"
    if not request.branches[0].num_generated:
        return "prefilling"
    return "decoding" if request.num_branches == 1 else "branched"


def start(request: Request) -> str:
    """How it gets its first blocks."""
    if request.usage.restored:
        return "resumed with what was loaded"
    return "resumed" if request.preemptions else "started"


@pytest.fixture(scope="module")
def seen() -> Iterator[Counter[str]]:
    """How often which path was taken in some random runs."""
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:

        def count(owner: type, method: str, name: Callable[..., str]) -> None:
            real = getattr(owner, method)

            def call(self: Any, *arguments: Any, **options: Any) -> Any:
                label = name(self, *arguments)
                result = real(self, *arguments, **options)
                counts[label] += 1
                return result

            patch.setattr(owner, method, call)

        count(FakeEngine, "cancel", lambda self, request, now: f"cancelled while {stage(self, request)}")
        count(WaitingQueue, "park", lambda *_: "parked")
        count(BlockManager, "fork", lambda *_: "forked")
        count(Running, "fork_again", lambda *_: "forked again")
        count(Running, "start", lambda _, request, __: start(request))
        count(Loading, "_fill_next", lambda *_: "loaded")
        count(Tiers, "is_intact", lambda _, __, held: "whole" if any(held.content) else "damaged")
        count(Scheduler, "fail", lambda *_: "failed")
        count(BlockManager, "pin", lambda *_: "pinned")
        count(Scheduler, "_give_up", lambda *_: "given up")
        for seed in range(100):
            result = fuzz(seed, steps=150)
            counts["refused"] += result.count(Outcome.REFUSED)
            counts.update(result.kept)
        yield counts


@pytest.mark.daily(12)
@pytest.mark.parametrize("path", PATHS)
def test_random_runs_take_the_path_of(seen: Counter[str], path: str) -> None:
    assert seen[path] >= 3, seen
