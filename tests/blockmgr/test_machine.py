"""Any sequence of operations, as hypothesis finds and shrinks them, over layer groups of all kinds."""

from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvq.blockmgr import BlockManager
from kvq.tiers.tiers import Tiers
from tests.blockmgr.client import Client
from tests.blockmgr.drive import PATHS
from tests.blockmgr.simulation import Simulation

EXPECTED = set(PATHS) - {"evicted", "grown"}
EXPECTED -= {
    "packed",
    "packed again",
    "unpacked",
    "restored",
    "restore lost",
    "refused restore",
}  # see test_drive.py
BASE = [0, 1, 0, 0, 1, 1, 0]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
SMALL = st.integers(0, 5)


def is_idle(client: Client) -> bool:
    return client.is_committed


def is_stepping(client: Client) -> bool:
    return not client.is_committed


class Machine(RuleBasedStateMachine):
    """The simulation's operations as rules. Two tenants, a shared salt; layer groups of all kinds."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        blocks=st.lists(st.integers(4, 9), min_size=2, max_size=3),
        size=st.integers(1, 3),
        window=st.integers(1, 6),
        sinks=st.integers(1, 3),
        bits=st.sampled_from([8, 2]),
        every=st.sampled_from([None, None, None, 2, 5]),
        kept=st.sampled_from(["", "", "", "tiers", "ladder", "tiers, ladder"]),
    )
    def begin(
        self,
        blocks: list[int],
        size: int,
        window: int,
        sinks: int,
        bits: int,
        every: int | None,
        kept: str,
    ) -> None:
        """A manager of some shape; with two bits, digests collide all the time."""
        groups = len(blocks)
        states = 0 if every is None else 1
        manager = BlockManager(
            num_blocks=blocks + [6] * states,
            block_size=size,
            windows=[None, window, None][:groups] + [2] * states,
            limits=[None, None, sinks * size][:groups] + [None] * states,
            lag=max(0, window - size) if groups == 3 else 0,
            state_group=groups if states else None,
            snapshot_every=every or 1,
            rungs={0: [4, 2]} if "ladder" in kept and bits == 8 else {},
            block_bytes=[8] * (groups + states),
        )
        if "tiers" in kept and bits == 8:
            manager.blocks.tiers = Tiers(1 << 20, None)
        if bits == 2:
            manager.blocks.index._digest = lambda data: bytes([sha256(data).digest()[0] & 3])
        self.sim = Simulation(manager)
        self.sim.start("a", BASE)
        self.compute(0, BASE)

    def compute(self, number: int, drafts: list[int]) -> None:
        """A request computes all it knows and some drafts, and commits it."""
        client = self.sim.clients[number]
        if self.sim.step([(client, 99, drafts)]):
            self.sim.commit(client, 2, [1])

    def pick(self, number: int, fits: Callable[[Client], bool] = lambda client: True) -> Client:
        """One of the clients that can be worked on; a precondition says that there is one."""
        fit = [client for client in self.sim.clients if fits(client)]
        return fit[number % len(fit)]

    @precondition(lambda self: len(self.sim.clients) < 5)
    @rule(tenant=st.sampled_from("ab"), known=SMALL, more=TOKENS, public=st.booleans(), reuse=st.booleans())
    def start(self, tenant: str, known: int, more: list[int], public: bool, reuse: bool) -> None:
        """A request arrives."""
        self.sim.start(tenant, BASE[:known] + more, "public" if public else None, reuse)

    @precondition(lambda self: 0 < len(self.sim.clients) < 5)
    @rule(number=SMALL, more=TOKENS)
    def start_again(self, number: int, more: list[int]) -> None:
        """A request continues what another one has, and is computed at once."""
        known = self.sim.clients[number % len(self.sim.clients)]
        self.sim.start(known.tenant, (known.tokens + more)[:14], known.shared)
        self.compute(-1, more[:2])

    @precondition(lambda self: len(self.sim.clients) < 5)
    @rule(tokens=TOKENS)
    def adopt(self, tokens: list[int]) -> None:
        """A request arrives with the KV of its whole blocks."""
        self.sim.adopt("b", tokens, len(tokens) // self.sim.size)

    @precondition(lambda self: self.sim.manager.blocks.tiers or self.sim.manager.blocks.ladder.has_rungs)
    @rule(tenant=st.sampled_from("aab"), number=SMALL, lost=st.integers(0, 6), gives_up=st.booleans())
    def restore(self, tenant: str, number: int, lost: int, gives_up: bool) -> None:
        """What left the pools of a prompt comes back, maybe after everything of it was given up."""
        known = [BASE, *self.sim.past]
        tokens = [*known[number % len(known)], 1]
        if gives_up:
            self.sim.give_up(tenant, tokens, to_tiers=lost != 1)
        self.sim.restore(tenant, tokens, lost)

    @precondition(lambda self: any(map(is_idle, self.sim.clients)))
    @rule(number=SMALL, count=st.integers(1, 9), drafts=st.lists(st.integers(0, 1), max_size=3))
    def step(self, number: int, count: int, drafts: list[int]) -> None:
        """A request computes some tokens."""
        self.sim.step([(self.pick(number, is_idle), count, drafts)])

    @precondition(lambda self: any(map(is_idle, self.sim.clients)))
    @rule(drafts=st.lists(st.integers(0, 1), max_size=2))
    def step_all(self, drafts: list[int]) -> None:
        """All requests compute what they can, some tokens are accepted."""
        work = [client for client in self.sim.clients if is_idle(client)]
        if self.sim.step([(client, 99, drafts) for client in work]):
            for client in work:
                self.sim.commit(client, 1, [0])

    @precondition(lambda self: any(map(is_stepping, self.sim.clients)))
    @rule(number=SMALL, accept=st.integers(0, 3), sampled=st.lists(st.integers(0, 1), max_size=1))
    def commit(self, number: int, accept: int, sampled: list[int]) -> None:
        """A step was good."""
        self.sim.commit(self.pick(number, is_stepping), accept, sampled)

    @precondition(lambda self: any(map(is_stepping, self.sim.clients)))
    @rule(number=SMALL)
    def fail(self, number: int) -> None:
        """A step was not."""
        self.sim.fail(self.pick(number, is_stepping))

    @precondition(lambda self: any(map(is_idle, self.sim.clients)) and len(self.sim.clients) < 5)
    @rule(number=SMALL, goes_on=st.booleans())
    def fork(self, number: int, goes_on: bool) -> None:
        """A request branches; maybe the new branch computes at once, in a block that both see."""
        self.sim.fork(self.pick(number, is_idle))
        if goes_on and is_idle(self.sim.clients[-1]):
            self.compute(-1, [0, 1])

    @precondition(lambda self: self.sim.clients)
    @rule(number=SMALL, length=st.integers(0, 20))
    def truncate(self, number: int, length: int) -> None:
        """A request is rewound."""
        client = self.pick(number)
        self.sim.truncate(client, min(length, client.sequence.length))

    @precondition(lambda self: self.sim.clients)
    @rule(number=SMALL)
    def preempt(self, number: int) -> None:
        """A request is preempted, also in the middle of a step."""
        self.sim.preempt(self.pick(number))

    @precondition(lambda self: self.sim.away and len(self.sim.clients) < 5)
    @rule(number=SMALL, lost=st.integers(0, 6), restores=st.booleans())
    def resume(self, number: int, lost: int, restores: bool) -> None:
        """A preempted request resumes, maybe after what left the pools of it came back, maybe with damage."""
        client = self.sim.away[number % len(self.sim.away)]
        if restores:
            self.sim.restore(client.tenant, client.tokens, lost, client.shared)
        self.sim.resume(client)

    @precondition(lambda self: self.sim.clients)
    @rule(number=SMALL, seconds=st.floats(0, 3))
    def pin(self, number: int, seconds: float) -> None:
        """What is indexed of a request is kept for a time, while some time passes."""
        self.sim.pin(self.pick(number), seconds)
        self.sim.wait(seconds / 2)

    @precondition(lambda self: self.sim.clients)
    @rule(number=SMALL)
    def end(self, number: int) -> None:
        """A request ends, in whatever state it is."""
        self.sim.free(self.sim.clients[number % len(self.sim.clients)])

    @rule()
    def drop_cached(self) -> None:
        """Everything cached goes."""
        self.sim.manager.drop_cached()

    @invariant()
    def nothing_is_broken(self) -> None:
        """Holds after every step."""
        if hasattr(self, "sim"):
            self.sim.check()
            self.sim.seen["steps"] += 1

    def teardown(self) -> None:
        """Nothing is left when all have gone."""
        if hasattr(self, "sim"):
            self.sim.close()
            self.seen.update(self.sim.seen)


def run(examples: int, steps: int) -> Counter[str]:
    """Let hypothesis choose; returns how often which path was taken."""
    Machine.seen = Counter()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
        ),
    )
    return Machine.seen


def test_no_sequence_of_operations_breaks_an_invariant() -> None:
    seen = run(examples=1000, steps=50)
    assert seen["steps"] >= 25_000
    assert {path for path in EXPECTED if seen[path] < 5} == set()


@pytest.mark.long
def test_no_long_sequence_of_operations_breaks_an_invariant() -> None:
    seen = run(examples=4500, steps=100)
    assert seen["steps"] >= 250_000
    assert {path for path in EXPECTED if seen[path] < 30} == set()
