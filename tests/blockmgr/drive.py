"""Random requests against a simulated cache, checked after every step.

    python -m tests.blockmgr.drive --steps 1000000 --seed 1 --processes 2
    python -m tests.blockmgr.drive --steps 4000000 --length 400 --staged
    python -m tests.blockmgr.drive --steps 4000000 --length 400 --states

Episodes of a few thousand steps each, or of `--length`, on small pools of changing shape, so that blocks
are always short; with `--staged` all have the layer groups that stage tokens, with `--states` one of
recurrent states. A step is one operation on the block manager with everything that `Simulation.check` reads.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from hashlib import sha256
from typing import Any

from kvq.blockmgr import BlockManager
from kvq.blockmgr.prefix import sha256_digest
from kvq.tiers.tiers import Tiers
from tests.blockmgr.client import Client
from tests.blockmgr.simulation import Simulation

TENANTS = ["a", "b"]
EPISODE = 4000  # steps

# Every path that has to be taken often for a run to mean anything.
PATHS = [
    "hits", "parts", "copies on write", "evicted", "deduplicated", "waits", "forked", "failed", "rewound",
    "rewinds refused", "drafts accepted", "drafts rejected", "window moved", "preempted", "resumed",
    "found again", "refused", "pinned",
    "pins expired", "refused pin", "adopted", "refused adopt", "collisions", "grown", "beyond a limit",
    "sealed", "snapshots", "states stayed", "demoted", "restored", "restore lost", "refused restore",
    "packed", "packed again", "unpacked",
    "sealed", "snapshots", "states stayed", "miss: new_text", "miss: changed_text", "miss: salt",
    "miss: evicted", "miss: no_snapshot", "miss: limit",
]  # fmt: skip


def tiny_digest(bits: int) -> Callable[[bytes], bytes]:
    """A digest that collides all the time."""
    return lambda data: bytes([sha256(data).digest()[0] & ((1 << bits) - 1)])


def random_reach(
    rng: random.Random, size: int, staged: bool
) -> tuple[list[int | None], list[int | None], int]:
    """Windows and limits of layer groups; a third of them, or all, stage recent tokens and the first ones.

    And how many tokens must follow a block before the index may know it.
    """
    if staged or rng.random() < 1 / 3:
        base = rng.randint(2, 9) if rng.random() < 0.2 else None
        recent = rng.randint(0, 6)
        return [base, recent + size, None], [None, None, rng.randint(1, 3) * size], recent
    windows = rng.choice([[None], [None, rng.randint(1, 9)], [rng.randint(2, 9), None], [rng.randint(2, 7)]])
    return windows, [None] * len(windows), 0


def random_simulation(rng: random.Random, *, staged: bool = False, states: bool = False) -> Simulation:
    """A manager of random shape: groups, pool sizes, tiers, digests that collide or not."""
    size = rng.randint(1, 4)
    windows, limits, lag = random_reach(rng, size, staged)
    more: dict[str, Any] = {}
    if states or (not staged and rng.random() < 1 / 5):
        more = {"state_group": len(windows), "snapshot_every": rng.randint(1, 9)}
        windows, limits = [*windows, 2], [*limits, None]
    digest = tiny_digest(rng.randint(2, 5)) if rng.random() < 0.25 else sha256_digest
    aside = random.Random(str((size, windows, limits, lag, more)))  # `rng` goes on as without it
    tiers = None
    if digest is sha256_digest and aside.random() < 0.5:  # the tiers have nothing but digests to go by
        tiers = Tiers(aside.choice([8 * size * 20, 1 << 20]), None)
    if digest is sha256_digest and aside.random() < 0.5:
        full = [group for group, window in enumerate(windows) if window is None and limits[group] is None]
        more |= {"rungs": {group: [4, 2] for group in full}, "block_bytes": [8] * len(windows)}
    manager = BlockManager(
        num_blocks=[rng.randint(4, 12) for _ in windows],
        block_size=size,
        windows=windows,
        limits=limits,
        lag=lag,
        max_pinned_blocks=rng.choice([None, 3]),
        **more,
    )
    manager.blocks.index._digest = digest
    manager.blocks.tiers = tiers
    sim = Simulation(manager, max_clients=rng.randint(2, 6), mirrored=rng.random() < 0.5)
    sim.aside = aside
    return sim


def random_prompt(sim: Simulation, rng: random.Random) -> list[int]:
    """A new prompt, a next turn of a past one, or one that another request is computing now."""
    roll = rng.random()
    tokens = [int(rng.random() * 2) for _ in range(int(rng.random() * 9))]
    if roll < 0.45 and sim.past:
        return (rng.choice(sim.past) + tokens)[:14]
    if roll < 0.75 and sim.clients:
        known = rng.choice(sim.clients).tokens
        return (known[: 1 + int(rng.random() * len(known))] + tokens)[:14]
    return tokens


def random_step(sim: Simulation, rng: random.Random, *, grows: bool = True) -> None:
    """One operation, chosen by `rng` among those that make sense now."""
    roll = rng.random()
    room = len(sim.clients) < sim.max_clients
    if not sim.clients or (room and roll < 0.14):
        _arrive(sim, rng)
    elif roll > 0.94:
        _disturb(sim, rng, rng.choice(sim.clients), grows)
    else:
        client = sim.clients[int(rng.random() * len(sim.clients))]
        if client.is_committed:
            _continue(sim, rng, client)
        else:
            _conclude(sim, rng, client)


def _arrive(sim: Simulation, rng: random.Random) -> None:
    if sim.away and rng.random() < 0.35:
        _resume(sim, rng)
        return
    tokens = random_prompt(sim, rng)
    roll = rng.random()
    if sim.aside.random() < 0.1:
        sim.give_up(sim.aside.choice(TENANTS), tokens, to_tiers=sim.aside.random() < 0.8)
    for _ in sim.past[:2]:
        sim.restore(sim.aside.choice(TENANTS), [*sim.aside.choice(sim.past), 1], sim.aside.randint(0, 6))
    if sim.aside.random() < 0.8:
        sim.restore(sim.aside.choice(TENANTS), tokens, sim.aside.randint(0, 6))
    if roll < 0.08:
        sim.adopt(rng.choice(TENANTS), tokens, rng.randint(0, len(tokens) // sim.size))
    else:
        shared = "public" if roll < 0.25 else None
        sim.start(rng.choice(TENANTS), tokens, shared, reuse=roll < 0.95)


def _continue(sim: Simulation, rng: random.Random, client: Client) -> None:
    """Nothing is in flight: compute more, or end, branch or preempt the request."""
    roll = rng.random()
    if roll < 0.72:
        ready = [c for c in sim.clients if c.is_committed] if roll < 0.12 else [client]
        if not sim.step([(c, 1 + int(rng.random() * 5), _drafts(rng)) for c in ready]):
            _make_room(sim, rng)
    elif roll < 0.80:
        sim.free(client)
    elif roll < 0.87:
        if len(sim.clients) < sim.max_clients:
            sim.fork(client)
    elif roll < 0.93:
        sim.preempt(client)
    elif roll < 0.96:
        sim.truncate(client, int(rng.random() * (client.sequence.length + 1)))
    else:
        sim.pin(client, rng.random() * 4)


def _conclude(sim: Simulation, rng: random.Random, client: Client) -> None:
    """A step is in flight."""
    roll = rng.random()
    if roll < 0.88:
        long = len(client.tokens) > 16
        sampled = [] if long and roll < 0.5 else [int(rng.random() * 2)]
        sim.commit(client, int(rng.random() * 3), sampled)
        if long and roll < 0.3:
            sim.free(client)
    elif roll < 0.92:
        sim.truncate(client, int(rng.random() * (client.sequence.length + 1)))
    elif roll < 0.96:
        sim.fail(client)
    else:
        sim.free(client)


def _resume(sim: Simulation, rng: random.Random) -> None:
    client = rng.choice(sim.away)
    if rng.random() < 0.1:
        sim.away.remove(client)  # it was cancelled
        return
    if rng.random() < 0.8:
        sim.restore(client.tenant, client.tokens, rng.randint(0, 6), client.shared)
    sim.resume(client)


def _make_room(sim: Simulation, rng: random.Random) -> None:
    """What a scheduler does about a refusal, most of the time."""
    roll = rng.random()
    client = rng.choice(sim.clients)
    if roll < 0.4:
        sim.free(client)
    elif roll < 0.7:
        sim.preempt(client)


def _disturb(sim: Simulation, rng: random.Random, client: Client, grows: bool) -> None:
    """What is no request's doing: time, memory pressure, growth."""
    roll = rng.random()
    if roll < 0.75:
        sim.wait(rng.random())
    elif roll < 0.90:
        sim.manager.drop_cached()
    elif grows and sim.manager.pools[0].num_blocks < 24 and roll < 0.93:
        sim.grow(1)
        sim.seen["grown"] += 1
    else:
        sim.free(client)


def _drafts(rng: random.Random) -> list[int]:
    return [int(rng.random() * 2) for _ in range(int(rng.random() * 4))] if rng.random() < 0.3 else []


def episode(name: str, steps: int, staged: bool = False, states: bool = False) -> Counter[str]:
    """Drive one simulation; returns how often which path was taken.

    Raises:
        AssertionError: an invariant broke; the message says in which episode and step.
    """
    rng = random.Random(name)
    sim = random_simulation(rng, staged=staged, states=states)
    for step in range(steps):
        try:
            indexed = sum(pool.num_cached for pool in sim.manager.pools)
            random_step(sim, rng)
            sim.seen["evicted"] += max(0, indexed - sum(pool.num_cached for pool in sim.manager.pools))
            sim.check()
        except Exception as error:
            raise AssertionError(f"episode {name!r}, step {step}: {error!r}") from error
    sim.close()
    return sim.seen


def episodes(seed: int, steps: int, length: int = EPISODE) -> Iterator[tuple[str, int]]:
    """Names and lengths of the episodes of a run."""
    for number, first in enumerate(range(0, steps, length)):
        yield f"{seed}:{number}", min(length, steps - first)


def drive(
    *,
    steps: int,
    seed: int,
    processes: int = 1,
    length: int = EPISODE,
    staged: bool = False,
    states: bool = False,
) -> Counter[str]:
    """All episodes of a run, over several processes; returns how often which path was taken."""
    seen: Counter[str] = Counter()
    names, lengths = zip(*episodes(seed, steps, length), strict=True)
    one = partial(episode, staged=staged, states=states)
    if processes == 1:
        for more in map(one, names, lengths):
            seen += more
        return seen
    with ProcessPoolExecutor(processes) as pool:
        for more in pool.map(one, names, lengths, chunksize=4):
            seen += more
    return seen


def main() -> None:
    """Drive, and print what was seen as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--length", type=int, default=EPISODE)
    parser.add_argument("--staged", action="store_true")
    parser.add_argument("--states", action="store_true")
    options = parser.parse_args()
    begin = time.perf_counter()
    seen = drive(**vars(options))
    seconds = round(time.perf_counter() - begin, 1)
    print(json.dumps({**vars(options), "seconds": seconds, "seen": dict(sorted(seen.items()))}, indent=1))


if __name__ == "__main__":
    main()
