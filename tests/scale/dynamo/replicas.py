"""Replicas whose block events Dynamo's index reads, and what it says of prompts, against what they hold.

    unshare -rn python -m tests.scale.dynamo.replicas CASES

The index listens on every address of its machine, so both run in a network of their own, where there is
loopback and nothing else. Prints JSON.
"""

import fcntl
import json
import random
import socket
import struct
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Sequence
from time import monotonic, sleep

from kvq.bench.serve.process import free_port
from kvq.blockmgr import BlockManager
from kvq.server.kv_events.config import EventsConfig, Form
from kvq.server.kv_events.publisher import Publisher
from kvq.server.kv_events.stream import Change, EventStream
from tests.waiting import HANG_S

SIZE = 4  # tokens of a block
WAIT_S = HANG_S
_VOCABULARY = 6  # few, so that prompts begin alike


class Replica:
    """A block manager and its events on an address; for the share `loses` of batches there is no room."""

    def __init__(self, address: str, *, loses: float = 0.0, seed: int = 0, form: Form = "maps") -> None:
        self.config = EventsConfig(address=address, form=form)
        self.manager = BlockManager(num_blocks=[24], block_size=SIZE)
        self.publisher = Publisher(self.config, block_size=SIZE, on_join=self._joined)
        self._loses, self._rng, self._has_joined = loses, random.Random(seed), False
        self.stream = EventStream(self.manager, self.put)
        self.stream.include("")
        self.flush()

    def put(self, changes: Sequence[Change]) -> bool:
        return self._rng.random() >= self._loses and self.publisher.put(changes)

    def flush(self) -> None:
        """What an engine does after a step."""
        if self._has_joined:
            self._has_joined = False
            self.stream.tell_all()
        self.stream.flush()

    def holds(self, prompt: list[int]) -> int:
        """How many whole blocks of a prompt are there."""
        length, _, _ = self.manager.prefixes.held(self.manager.prompt(prompt))
        return length // SIZE

    def run(self, prompt: list[int], *, gives_up: bool) -> None:
        """Compute a prompt, and leave it cached unless it is given up at once."""
        manager = self.manager
        sequence = manager.start(manager.prompt(prompt))
        count = len(prompt) - sequence.length
        if not manager.can_append([(sequence, count)]):
            manager.free(sequence)
            return
        manager.append([(sequence, count)])
        manager.commit(sequence, [])
        manager.free(sequence)
        if gives_up:
            manager.below.give_up(manager.prompt(prompt), to_tiers=True)
        manager.take_orders()

    def _joined(self) -> None:
        self._has_joined = True


class Index:
    """Dynamo's own, in a process of its own."""

    def __init__(self, addresses: list[str]) -> None:
        self._url = f"http://127.0.0.1:{free_port()}"
        workers = ",".join(f"{number}={address}" for number, address in enumerate(addresses, start=1))
        line = [sys.executable, "-m", "dynamo.indexer", "--block-size", str(SIZE), "--workers", workers]
        self._process = subprocess.Popen(
            [*line, "--port", self._url.rpartition(":")[2]],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _until(lambda: self._answers(), "the index answers")

    def blocks(self, prompt: list[int], replicas: int) -> list[int]:
        """How many blocks of a prompt each replica holds, as the index knows."""
        body = json.dumps({"token_ids": prompt, "model_name": "default"}).encode()
        scores = self._ask("/query", body)["scores"]
        return [scores.get(str(number), {}).get("0", 0) // SIZE for number in range(1, replicas + 1)]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(WAIT_S)

    def _answers(self) -> bool:
        try:
            return bool(self._ask("/workers"))
        except OSError:
            return False

    def _ask(self, path: str, body: bytes | None = None) -> dict:
        request = urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return json.loads(answer.read())


def _until(condition, what: str) -> None:
    began = monotonic()
    while not condition():
        if monotonic() - began > WAIT_S:
            raise AssertionError(f"never: {what}")
        sleep(0.005)


def _prompt(rng: random.Random, known: list[list[int]]) -> list[int]:
    """A new one, or one that begins as another did."""
    fresh = [rng.randrange(_VOCABULARY) for _ in range(rng.randint(1, 5 * SIZE))]
    if known and rng.random() < 0.7:
        other = rng.choice(known)
        return other[: rng.randint(1, len(other))] + fresh
    return fresh


def compare(cases: int, *, loses: float, form: Form, seed: int = 27) -> dict[str, int]:
    """Random work on three replicas; after each, a random prompt is looked up in the index.

    Returns counts of what the cases were.

    Raises:
        AssertionError: the index never said what the replicas hold.
    """
    rng, known, seen = random.Random(seed), list[list[int]](), Counter[str]()
    replicas = [Replica(f"tcp://127.0.0.1:{free_port()}", loses=loses, seed=n, form=form) for n in range(3)]
    index = Index([replica.config.address for replica in replicas])
    evicted = Counter[str]()
    for replica in replicas:
        replica.manager.subscribe(lambda event: evicted.update([type(event).__name__]))
    for _ in range(cases):
        for replica in rng.choices(replicas, k=rng.randint(1, 3)):
            if rng.random() < 0.03:
                replica.manager.drop_cached()
                seen["all dropped"] += 1
            prompt = _prompt(rng, known)
            known = [*known[-200:], prompt]
            gives_up = rng.random() < 0.1
            replica.run(prompt, gives_up=gives_up)
            seen["given up"] += gives_up
            replica.flush()
        if rng.random() < 0.01:
            replicas[0] = _restart(replicas[0], orderly=rng.random() < 0.5)
            replicas[0].manager.subscribe(lambda event: evicted.update([type(event).__name__]))
            seen["restarted"] += 1
        asked = rng.choice(known[-12:])  # the pools hold about as many
        held = [replica.holds(asked) for replica in replicas]

        def agree() -> bool:
            for replica in replicas:
                replica.flush()
            return index.blocks(asked, len(replicas)) == held  # noqa: B023 - called at once

        _until(agree, f"the index says {held} of {asked}, not {index.blocks(asked, len(replicas))}")
        best = max(held)
        seen[
            "nobody holds it" if not best else "one holds most" if held.count(best) == 1 else "several do"
        ] += 1
    seen["removals"] = evicted["Evicted"]
    seen["lost"] = sum(replica.stream.dropped for replica in replicas)
    index.close()
    for replica in replicas:
        replica.publisher.close()
    return dict(seen)


def _restart(old: Replica, *, orderly: bool) -> Replica:
    """An engine that ends, with a word or without one, and its successor on the same address."""
    if orderly:
        old.stream.close()
    old.publisher.close()
    return Replica(old.config.address, form=old.config.form)


def bring_up_loopback() -> None:
    """A new network has a loopback that is down."""
    with socket.socket() as any_socket:
        up_and_running = struct.pack("16sh14x", b"lo", 0x1 | 0x40)
        fcntl.ioctl(any_socket, 0x8914, up_and_running)  # SIOCSIFFLAGS


def main() -> None:
    """Compare; then with events of the other form, and with batches that are lost."""
    bring_up_loopback()
    cases = int(sys.argv[1])
    calm, lossy = compare(cases, loses=0.0, form="maps"), compare(cases // 5, loses=0.3, form="arrays")
    print(json.dumps([calm, lossy]))


if __name__ == "__main__":
    main()
