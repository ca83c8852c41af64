"""Running out of blocks at every possible place, one after another."""

from collections.abc import Callable
from typing import Any

import pytest

from kvq.blockmgr import BlockManager, BlockPool
from kvq.errors import OutOfBlocks
from kvq.tiers.tiers import Tiers
from tests.blockmgr.client import Client
from tests.blockmgr.simulation import Simulation
from tests.blockmgr.state import state, unordered

PROMPT = [1, 0, 1, 1, 0, 0, 1]


class Fault:
    """Makes one call of a method fail, the n-th."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str, fails: Callable[[], Any]) -> None:
        self.countdown = 0
        self.fired = False
        real = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            self.countdown -= 1
            if not self.countdown:
                self.fired = True
                return fails()
            return real(*arguments)

        patch.setattr(owner, name, call)


def out_of_blocks() -> None:
    raise OutOfBlocks("injected")


def simulation(num_blocks: int) -> Simulation:
    manager = BlockManager(num_blocks=[num_blocks] * 2, block_size=2, windows=[None, 4], max_pinned_blocks=9)
    manager.blocks.tiers = Tiers(1 << 20, None)
    sim = Simulation(manager)
    sim.surprised = True
    return sim


def compute(sim: Simulation, *which: int) -> None:
    """All that is known of some clients in one step."""
    clients = [sim.clients[i] for i in which]
    sim.step([(client, 99, [1]) for client in clients])


def commit(sim: Simulation, *which: int, accept: int = 1) -> None:
    for i in which:
        sim.commit(sim.clients[i], accept, [0])


def give_up(sim: Simulation, client: Client) -> None:
    sim.give_up(client.tenant, client.tokens, to_tiers=True)


def restore(sim: Simulation, client: Client) -> None:
    sim.restore(client.tenant, client.tokens, 99)


def refusals(sim: Simulation) -> int:
    return sum(count for path, count in sim.seen.items() if path.startswith("refused"))


# A part is copied at the second start; the forks' last blocks, shared in both groups, at their step.
SCENARIO: list[Callable[[Simulation], Any]] = [
    lambda sim: sim.start("a", PROMPT),
    lambda sim: compute(sim, 0),
    lambda sim: commit(sim, 0),
    lambda sim: sim.start("a", [*PROMPT[:5], 1, 1]),
    lambda sim: compute(sim, 1),
    lambda sim: commit(sim, 1),
    lambda sim: compute(sim, 0, 1),
    lambda sim: commit(sim, 0, 1, accept=0),
    lambda sim: sim.fork(sim.clients[0]),
    lambda sim: compute(sim, 0, 2),
    lambda sim: commit(sim, 0, 2),
    lambda sim: sim.adopt("b", PROMPT, 3),
    lambda sim: commit(sim, 3),
    lambda sim: sim.preempt(sim.clients[3]),
    lambda sim: sim.preempt(sim.clients[2]),
    lambda sim: sim.preempt(sim.clients[0]),
    lambda sim: sim.pin(sim.clients[0], 1.0),
    *(lambda sim, i=i: give_up(sim, sim.away[i]) for i in range(3)),
    *(lambda sim, i=i: restore(sim, sim.away[i]) for i in range(3)),
    *(lambda sim: sim.resume(sim.away[0]) for _ in range(3)),
    *(lambda sim, i=i: compute(sim, i) for i in (1, 2, 3)),
    *(lambda sim, i=i: commit(sim, i) for i in (1, 2, 3)),
    lambda sim: sim.wait(2.0),
]


def play(sim: Simulation, fault: Fault, *, strict: bool) -> None:
    """The scenario; an operation that failed is tried again."""
    for operation in SCENARIO:
        before, refused = unordered(state(sim.manager)), refusals(sim)
        operation(sim)
        sim.check()
        if refusals(sim) > refused:
            if strict:
                assert fault.fired
                assert unordered(state(sim.manager)) == before
            operation(sim)
            sim.check()


def test_a_failure_at_any_place_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(monkeypatch, BlockPool, "allocate", out_of_blocks)
    n = 1
    while True:
        fault.countdown, fault.fired = n, False
        sim = simulation(num_blocks=40)
        play(sim, fault, strict=True)
        assert sim.seen["resumed"] == sim.seen["found again"] == 3
        assert sim.seen["restored"] == 2
        assert sim.seen["copies on write"] >= 2
        sim.close()
        if fault.countdown > 0:
            break
        n += 1
    assert n > 18


def test_a_failure_under_pressure_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(monkeypatch, BlockPool, "allocate", out_of_blocks)
    refused = 0
    for n in range(1, 60):
        sim = simulation(num_blocks=13)
        fault.countdown, fault.fired = n, False
        play(sim, fault, strict=False)
        refused += refusals(sim)
        sim.close()
    assert refused > 60  # not only the injected ones
