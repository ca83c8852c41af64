"""Questions change nothing and tell the truth; a refused operation leaves everything as it was."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvq.blockmgr import BlockManager
from kvq.errors import ConfigError, OutOfBlocks
from tests.blockmgr.drive import TENANTS, random_prompt, random_simulation, random_step
from tests.blockmgr.simulation import Simulation
from tests.blockmgr.state import state

SEEDS = range(8)


def ask_everything(sim: Simulation, rng: random.Random) -> None:
    manager = sim.manager
    for shared in (None, "public"):
        prompt = manager.prompt(random_prompt(sim, rng), tenant=rng.choice(TENANTS), shared_salt=shared)
        manager.lookup(prompt)
        manager.prefixes.held(prompt)
        manager.can_admit(prompt, rng.randint(1, 6))
    ready = [client for client in sim.clients if client.is_committed]
    manager.can_append([(client.sequence, rng.randint(0, 9)) for client in ready])
    manager.usage()
    manager.utilization()
    manager.sequences()
    manager.check_integrity()


@pytest.mark.parametrize("seed", SEEDS)
def test_questions_change_nothing(seed: int) -> None:
    rng = random.Random(seed)
    sim = random_simulation(rng)
    for _ in range(400):
        random_step(sim, rng)
        before = state(sim.manager)
        ask_everything(sim, rng)
        assert state(sim.manager) == before


@pytest.mark.parametrize("seed", sorted({*SEEDS, 9} - {1}))  # the pools of 1 are hardly ever full
def test_can_admit_tells_whether_a_start_and_its_first_step_succeed(seed: int) -> None:
    rng = random.Random(seed)
    sim = random_simulation(rng)
    answers: Counter[bool] = Counter()
    for _ in range(1500):
        random_step(sim, rng)
        tokens = random_prompt(sim, rng)
        prompt = sim.manager.prompt(tokens, tenant=rng.choice(TENANTS))
        length = sim.manager.lookup(prompt).length
        if len(sim.clients) >= sim.max_clients or length == len(tokens):
            continue
        count = rng.randint(1, len(tokens) - length)
        admitted = sim.manager.can_admit(prompt, count)
        sim.start(prompt.tenant, tokens)
        client = sim.clients[-1]
        assert sim.step([(client, length + count - client.sequence.length, [])]) == admitted
        answers[admitted] += 1
        sim.check()
        if rng.random() < 0.7:
            sim.free(client)
    assert min(answers[True], answers[False]) > 10


def test_can_admit_leaves_the_reserve_alone() -> None:
    manager = BlockManager(num_blocks=[6], block_size=2, reserve_blocks=2)
    prompt = manager.prompt([1] * 12)
    assert manager.can_admit(prompt, 8)
    assert not manager.can_admit(prompt, 9)
    running = manager.new_sequence()
    assert manager.can_append([(running, 12)])
    assert not manager.can_append([(running, 13)])


def test_can_admit_does_not_count_the_blocks_it_would_share_as_room() -> None:
    manager = BlockManager(num_blocks=[4], block_size=2)
    sequence = manager.start(manager.prompt([1, 1, 1, 1]))
    manager.append([(sequence, 4)])
    manager.commit(sequence)
    manager.free(sequence)
    same = manager.prompt([1, 1, 1, 1, 2, 2, 2, 2])
    assert manager.can_admit(same, 4)
    assert not manager.can_admit(same, 5)
    assert manager.can_admit(manager.prompt([3] * 9), 8)


def watched(operation: Callable[..., Any], manager: BlockManager, seen: Counter[str]) -> Callable[..., Any]:
    """The operation; if it is refused, nothing may have changed."""

    def call(*arguments: Any) -> Any:
        before = state(manager)
        try:
            return operation(*arguments)
        except (OutOfBlocks, ConfigError):
            assert state(manager) == before
            seen[operation.__name__] += 1
            raise

    return call


def test_a_refused_operation_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        rng = random.Random(seed)
        sim = random_simulation(rng)
        for name in ("append", "adopt", "pin", "truncate"):
            wrapped = watched(getattr(sim.manager, name), sim.manager, seen)
            monkeypatch.setattr(sim.manager, name, wrapped)
        for _ in range(2500):
            random_step(sim, rng)
    assert set(seen) == {"append", "adopt", "pin", "truncate"}
    assert min(seen.values()) >= 10
