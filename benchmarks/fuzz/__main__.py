"""Everything that comes from outside, made up and broken, and whether kvq bears it.

    python -m benchmarks.fuzz [--seconds 3600] [--doors http,wire,...] [--cases N] [--seed N] [--out FOLDER]

Doors: `http`, requests from the server's own document; `wire`, bytes that are nearly HTTP; `ends`, servers
with TLS and keys that get nearly TLS and nearly HTTP until SIGTERM ends them, at any moment of their lives;
`results`, `options`, `streams`, `folders`, `gguf` and `templates`, which need no server. All run at once.
Asked is: no traceback, no 5xx, an event loop that never computes for more than 50 ms, no leak, and an end
within the grace and a second. Every case has a number of its own, so that a finding can be had again;
`seeds.json` keeps those that once found something. Writes FOLDER/fuzz-cpu.json; ends with 1 if something
falls short.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import schemathesis

from benchmarks.findings import NO_BOUNDS, RESULTS, Rows, finding, report
from benchmarks.floods import certify
from benchmarks.fuzz import handshakes, inside, wire
from benchmarks.fuzz.door import Tally, seeds_of
from benchmarks.fuzz.http import Requests
from benchmarks.rude import memory_bytes, metrics, reset, stall
from kvq.bench.engine.load import LoadRequest
from kvq.bench.serve.client import send
from kvq.bench.serve.process import ServerProcess
from kvq.errors import EngineError
from kvq.evals.report.results import source_commit

AT_SERVER = ("http", "wire", "ends")
_WIRES = 4  # threads of the door
_LOOK_S = 2.0
_STALL_S = 0.05
_KEPT = 20  # findings that are written down
_SMALL = ("--model", "tiny", "--kv", "int4", "--num-blocks", "64", "--max-num-seqs", "8")
_POOLS = ("--pooling", "mean")  # embeddings, too
_SHORT = ("--max-model-len", "256")  # so that "as long as the context" is not long
_KEY = "fuzzed"
_TROUBLE = ("Traceback", "level=error", "Exception")


class Run:
    """One run: who has how long, and what was found."""

    def __init__(self, doors: list[str], seconds: float, cases: int, first: int) -> None:
        self.tallies = {door: Tally(door) for door in doors if door in AT_SERVER}
        self.statuses: dict[str, int] = {}
        self.logged: list[str] = []
        self.stretches_s: dict[str, float] = {}  # by server
        self.memory: dict[str, list[int]] = {}
        self.ends: list[tuple[str, float, float]] = []  # state, grace, seconds
        self.left: dict[str, float] = {}
        self.cases, self.first, self.seconds = cases, first, seconds
        self._end_s = monotonic() + seconds
        self._is_ended = False

    def is_over(self, door: str) -> bool:
        """Return True if a door has run all its cases."""
        tally = self.tallies.get(door)
        is_done = tally is not None and tally.num_cases >= self.cases
        return self._is_ended or is_done or monotonic() > self._end_s

    def end(self) -> None:
        """No more cases."""
        self._is_ended = True

    def look_at(self, server: ServerProcess) -> None:
        """Note lines of a server's log that should not be there."""
        self.logged += [line for line in server.log.splitlines() if any(word in line for word in _TROUBLE)]


async def main_server(run: Run, doors: list[str]) -> None:
    """One server for all of the run: `http` and `wire`, and what is left after them."""
    async with ServerProcess([*_SMALL, *_SHORT, *_POOLS, "--log-level", "warning", *NO_BOUNDS]) as server:
        engine = server.engine_pid
        jobs: list[Callable[[], object]] = []
        if "http" in doors:
            made = Requests(server.target, run.tallies["http"], partial(run.is_over, "http"))
            run.statuses = made.statuses
            jobs.append(partial(made.run, seeds_of("http", run.first)))
        if "wire" in doors:
            jobs += [partial(_wire, run, server, i) for i in range(_WIRES)]
        threads = [asyncio.to_thread(job) for job in jobs]
        working = asyncio.gather(*threads)
        try:
            while not working.done():
                for name, held in memory_bytes(server).items():
                    run.memory.setdefault(name, []).append(held)
                await asyncio.wait([working], timeout=_LOOK_S)
            await working
        finally:
            run.end()
        run.left = await _left(server)
        run.left["restarts of the engine"] = float(server.engine_pid != engine)
        await _note_stretch(run, server, "main")
        if (status := await server.status("/health/deep")) != 200:
            run.logged.append(f"/health/deep answers {status}")
        run.look_at(server)


async def _note_stretch(run: Run, server: ServerProcess, name: str) -> None:
    run.stretches_s[name] = (await metrics(server))["kvq_http_longest_stretch_seconds"]


def _wire(run: Run, server: ServerProcess, thread: int) -> None:
    for number in seeds_of("wire", run.first + thread, _WIRES):
        if run.is_over("wire"):
            return
        run.tallies["wire"].run(lambda odds: wire.case(odds, server.target), number)


async def _left(server: ServerProcess) -> dict[str, float]:
    """Return what the server still holds after the last response; pins hold their blocks."""
    left: dict[str, float] = {}
    for _ in range(100):
        seen = await metrics(server)
        live = sum(v for name, v in seen.items() if name.startswith("kvq_blocks/") and name.endswith("/live"))
        pinned = sum(value for name, value in seen.items() if name.startswith("kvq_blocks_pinned/"))
        running = sum(value for name, value in seen.items() if name.startswith("kvq_engine_requests/"))
        others = seen["kvq_http_connections"] - 1  # than the one that asks
        left = {"requests": running, "live blocks": live - pinned, "connections": others}
        if not any(left.values()):
            break
        await asyncio.sleep(0.2)
    return left


async def ending_servers(run: Run) -> None:
    """One after the other, each ended by SIGTERM at some moment of its life."""
    for number in seeds_of("ends", run.first):
        if run.is_over("ends"):
            return
        odds = random.Random(f"ends/{number}")
        await _one_end(run, odds, number)


async def _one_end(run: Run, odds: random.Random, number: int) -> None:
    grace_s = odds.choice((0.5, 1.0, 3.0))
    tally = run.tallies["ends"]
    with _secured() as (options, tls):
        server = ServerProcess(
            [*_SMALL, *options, "--grace", str(grace_s), "--log-level", "warning", *NO_BOUNDS],
            key=_KEY,
            tls=tls,
        )
        stop = threading.Event()
        threads: list[threading.Thread] = []
        streams: list[asyncio.Task[None]] = []
        try:
            state = "starting"
            if odds.random() < 0.4:
                await asyncio.sleep(odds.uniform(0, 8))
            else:
                with suppress(EngineError):
                    await server.wait_ready(300)
                state = "attacked"
                threads = _attack(tally, server, stop, number)
                streams = [asyncio.create_task(_long(server, odds)) for _ in range(3)]
                await asyncio.sleep(odds.uniform(0.5, 12))
                with suppress(OSError, EOFError, TimeoutError, KeyError):
                    await _note_stretch(run, server, f"ends {number}")
            await _end(run, server, state, grace_s, number)
        finally:
            stop.set()
            server.process.kill()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            await asyncio.gather(*streams)
            run.look_at(server)


async def _long(server: ServerProcess, odds: random.Random) -> None:
    """Streams that run for seconds, or for ever, so that one is running whenever the server ends."""
    while server.process.poll() is None:
        request = LoadRequest(
            index=0, prompt=[odds.randrange(2, 4000)], output_tokens=odds.choice((50, 1900))
        )
        leave = odds.choice((None, reset, stall(odds.uniform(0, 20))))
        await send(server.target, request, monotonic(), leave)
        await asyncio.sleep(0.05)


async def _end(run: Run, server: ServerProcess, state: str, grace_s: float, number: int) -> None:
    """SIGTERM, and how long it takes."""
    tally = run.tallies["ends"]
    if (status := server.process.poll()) is not None:
        tally.find(number, f"a server ended by itself with {status}: {server.log[-600:]}")
        return
    began = monotonic()
    server.process.send_signal(signal.SIGTERM)
    try:
        await asyncio.to_thread(server.process.wait, grace_s + 30)
    except subprocess.TimeoutExpired:
        tally.find(number, f"a server that was {state} did not end within its grace of {grace_s} s and 30 s")
        return
    took_s = monotonic() - began
    run.ends.append((state, grace_s, took_s))
    if took_s > grace_s + 1:
        told = f"a server that was {state}, with a grace of {grace_s} s, took {took_s:.1f} s to end"
        tally.find(number, f"{told}: {server.log[-600:]}")
    # By the signal itself as long as Python, or the command's modules, are being loaded.
    if server.process.returncode not in ((0,) if state == "attacked" else (0, 130, -signal.SIGTERM)):
        tally.find(
            number, f"a server that was {state} ended with {server.process.returncode}: {server.log[-600:]}"
        )


def _attack(
    tally: Tally, server: ServerProcess, stop: threading.Event, number: int
) -> list[threading.Thread]:
    """Three threads that talk to a server, also while it ends."""

    def one(thread: int) -> None:
        for i in itertools.count():
            if stop.is_set() or server.process.poll() is not None:
                return
            tally.run(lambda odds: handshakes.case(odds, server.target), (number << 24) + (i << 2) + thread)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    return threads


@contextmanager
def _secured() -> Iterator[tuple[list[str], ssl.SSLContext]]:
    """Options for TLS and a key, and what trusts it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, trusting = Path(scratch), ssl.create_default_context()
        certify(folder, trusting)
        keys = folder / "keys"
        keys.touch(0o600)
        keys.write_text(_KEY)
        options = ["--ssl-certfile", folder / "cert", "--ssl-keyfile", folder / "key", "--api-key-file", keys]
        yield [str(option) for option in options], trusting


async def fuzz(run: Run, doors: list[str]) -> Rows:
    """All doors at once, as rows."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))  # doors keep threads to the end
    within = [door for door in doors if door in inside.DOORS]
    command = [sys.executable, "-m", "benchmarks.fuzz.inside", "--doors", ",".join(within)]
    command += ["--seconds", str(run.seconds), "--first", str(run.first), "--cases", str(run.cases)]
    told: dict[str, Any] = {"doors": {}, "memory": []}
    tasks = []
    async with AsyncExitStack() as stack:
        if within:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            process = subprocess.Popen(["nice", *command], stdout=subprocess.PIPE, env=environment)
            stack.callback(process.kill)
            tasks.append(asyncio.to_thread(process.communicate))
        if {"http", "wire"} & set(doors):
            tasks.append(main_server(run, doors))
        if "ends" in doors:
            tasks.append(ending_servers(run))
        results = await asyncio.gather(*tasks)
    if within:
        told = json.loads(results[0][0])
    return _rows(run, told)


def _rows(run: Run, told: dict[str, Any]) -> Rows:
    shown = {door: vars(tally) for door, tally in run.tallies.items()} | told["doors"]
    findings = [one for tally in shown.values() for one in tally["findings"]]
    cases = {door: tally["num_cases"] for door, tally in shown.items()}
    rows = [
        finding("cases", sum(cases.values()), "", True, doors=cases),
        finding("findings", len(findings), "0", not findings, first=findings[:_KEPT]),
        finding("answers", dict(run.statuses), "no 5xx", not any(s >= "500" for s in run.statuses)),
        finding(
            "errors and tracebacks in logs", len(run.logged), "0", not run.logged, first=run.logged[:_KEPT]
        ),
        finding(
            "slowest case, s",
            max(t["slowest_s"] for t in shown.values()),
            "",
            True,
            doors={door: t["slowest_s"] for door, t in shown.items()},
        ),
    ]
    if run.stretches_s:
        where, longest = max(run.stretches_s.items(), key=lambda one: one[1])
        rows.append(
            finding(
                "longest stretch of an event loop, ms", 1e3 * longest, "50", longest <= _STALL_S, where=where
            )
        )
    for what, count in run.left.items():
        rows.append(finding(f"left: {what}", count, "0", count == 0))
    for name, memory in (run.memory | {"doors without a server": told["memory"]}).items():
        if len(memory) >= 50:
            rows.append(_growth(name, memory))
    if run.ends:
        beyond = [seconds - grace for _, grace, seconds in run.ends]
        states = {state: sum(one[0] == state for one in run.ends) for state in ("starting", "attacked")}
        rows.append(
            finding(
                "SIGTERM: end after the grace, longest s", max(beyond), "1", max(beyond) <= 1, ends=states
            )
        )
    return rows


def _growth(name: str, memory: list[int]) -> dict[str, Any]:
    tenth = len(memory) // 10
    first, last = median(memory[2 * tenth : 4 * tenth]), median(memory[-2 * tenth :])
    megabytes = [round(one / 1e6) for one in memory[::tenth]]
    what = f"memory of {name}: last fifth / second fifth"
    return finding(what, last / first, "1.05", last <= 1.05 * first, megabytes=megabytes)


def main() -> None:
    """Fuzz, and write what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = (*AT_SERVER, *inside.DOORS)
    parser.add_argument("--doors", default=",".join(every))
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--cases", type=int, default=1 << 40, help="of each door, after which it has no more")
    parser.add_argument(
        "--seed", type=int, default=0, help="number of the first case, after those of seeds.json"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    doors = given.doors.split(",")
    if unknown := set(doors) - set(every):
        parser.error(f"no door {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whatever was started is ended
    source_commit()
    began = monotonic()
    rows = asyncio.run(fuzz(Run(doors, given.seconds, given.cases, given.seed), doors))
    more = {"seconds": monotonic() - began, "schemathesis": schemathesis.__version__}
    sys.exit(not report(given.out / "fuzz-cpu.json", rows, **more))


if __name__ == "__main__":
    main()
