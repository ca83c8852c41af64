"""Random requests under memory pressure: nothing breaks, nothing leaks, and every path is really taken."""

import random
from collections import Counter

import pytest

from kvq.blockmgr import BlockManager
from tests.blockmgr.drive import PATHS, drive, episode, episodes, random_step
from tests.blockmgr.simulation import Simulation


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    return drive(steps=60_000, seed=1)


@pytest.mark.daily(20)
@pytest.mark.parametrize("path", PATHS)
def test_a_checked_run_takes_the_path_of(seen: Counter[str], path: str) -> None:
    assert seen[path] >= 30


def test_a_run_is_repeated_exactly_by_its_seed() -> None:
    assert list(episodes(3, 9000)) == [("3:0", 4000), ("3:1", 4000), ("3:2", 1000)]
    first = episode("3:0", 1500)
    assert first == episode("3:0", 1500)
    assert first != episode("3:1", 1500)


@pytest.mark.parametrize("requests", [3_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_block_leaks_over_pools_of_8_blocks(requests: int) -> None:
    manager = BlockManager(num_blocks=[8, 8], block_size=2, windows=[None, 5])
    sim = Simulation(manager, max_clients=4)
    rng = random.Random(8)
    steps = 0
    while sim.seen["requests"] < requests:
        random_step(sim, rng, grows=False)
        steps += 1
        for usage in manager.usage():
            assert usage.free + usage.cached + usage.live == usage.total == 8
        if steps % 20 == 0:
            sim.check()
    sim.close()
    assert [pool.num_free for pool in manager.pools] == [8, 8]


@pytest.mark.long
def test_20_million_steps_keep_every_invariant() -> None:
    seen = drive(steps=20_000_000, seed=2026, processes=2)
    assert {path for path in PATHS if seen[path] < 5_000} == set()
