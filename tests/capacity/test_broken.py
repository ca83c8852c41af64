"""A simulator that can't fail proves nothing: defects that are put in on purpose are found."""

from collections.abc import Callable
from typing import Any

import pytest

from kvq.blockmgr import BlockManager, Copy, Fill, Scrub
from kvq.blockmgr.blocks import Blocks
from kvq.blockmgr.packed.ladder import Ladder, Pack
from kvq.blockmgr.sequence import Sequence
from kvq.scheduler import Priority, Request, Scheduler, fit
from kvq.scheduler.loading import Loading
from kvq.scheduler.running import Running
from kvq.scheduler.waiting_queue import WaitingQueue, _FairQueue
from kvq.tiers.tiers import Tiers
from tests.capacity.harness import fuzz
from tests.capacity.harness.fake_model import FakeModel

Defect = Callable[..., Any]  # takes what it replaces, then the arguments


def nothing(real: Defect, *_: Any) -> None:
    """Does nothing at all."""


def without(kind: type) -> Defect:
    """Orders of one kind are lost."""
    return lambda real, manager: [order for order in real(manager) if not isinstance(order, kind)]


def last_first(real: Defect, queue: _FairQueue, *, below: Priority | None = None) -> Request | None:
    """The youngest goes first."""
    waiting = [request for request in queue if below is None or request.priority < below]
    return waiting[-1] if waiting else None


def keep_blocks(real: Defect, self: Running, branch: Any) -> None:
    """A branch forgets its sequence and frees nothing."""
    self.active.pop(branch, None)
    branch.sequence = None


def forget_row(real: Defect, self: Running, branch: Any) -> None:
    """A branch forgets its row and does not give it back."""
    branch.row = None


def keep_loaded(real: Defect, self: Loading, request: Request) -> None:
    """What was loaded for a request stays, though nobody remembers it."""
    self._held.pop(request, None)


def count_only(real: Defect, self: Ladder, keys: Any) -> None:
    """Packed blocks that are read can be evicted."""
    for key in keys:
        self._where[key][0].holds += 1


def lose_last_change(real: Defect, self: FakeModel, plan: Any, *arguments: Any) -> Any:
    """Every 50th step one row is not told of a change."""
    if plan.number % 50 == 49 and plan.table_changes:
        plan.table_changes.pop()
    return real(self, plan, *arguments)


def end_without_record(real: Defect, self: Scheduler, request: Request) -> None:
    """Every seventh request that is cancelled goes on."""
    if int(request.id) % 7:
        real(self, request)


DEFECTS: dict[str, tuple[object, str, Defect]] = {
    "rows don't learn of kept tables": (Sequence, "mark_all", nothing),
    "a table change is lost": (FakeModel, "run", lose_last_change),
    "merged blocks are not marked": (Sequence, "mark", lambda real, self, group, index: real(
        self, group, max(index, len(self.tables[group]) - 1)
    )),
    "copies are not made": (BlockManager, "take_orders", without(Copy)),
    "loaded blocks are not filled in": (BlockManager, "take_orders", without(Fill)),
    "blocks are not packed": (BlockManager, "take_orders", without(Pack)),
    "packed blocks that are read are overwritten": (Ladder, "hold", count_only),
    "failed blocks are not zeroed": (BlockManager, "take_orders", without(Scrub)),
    "damage is overlooked": (Tiers, "is_intact", lambda *_: True),
    "windows are one token short": (Blocks, "first_seen", lambda real, self, group, length: real(
        self, group, length + 1
    )),
    "blocks leak": (Running, "_free", keep_blocks),
    "rows leak": (Running, "_give_row_back", forget_row),
    "loaded blocks leak": (Loading, "let_go", keep_loaded),
    "the worst case is one block short": (fit, "most_blocks", lambda real, *arguments, **options: [
        max(1, blocks - 1) for blocks in real(*arguments, **options)
    ]),
    "who waits for a prefix is not woken": (WaitingQueue, "wake", nothing),
    "the last goes first": (_FairQueue, "first", last_first),
    "a cancelled request goes on": (Scheduler, "end", end_without_record),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, defect = DEFECTS[name]
    real = getattr(owner, attribute)
    monkeypatch.setattr(owner, attribute, lambda *args, **options: defect(real, *args, **options))
    with pytest.raises(AssertionError, match=r"^seed \d+, step \d+: "):
        many_seeds()


def many_seeds() -> None:
    """A fifth of what the tests run."""
    for seed in range(60):
        fuzz(seed, steps=150)
