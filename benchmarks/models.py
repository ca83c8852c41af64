"""Several models in one server: apart from one another, within their memory, and versions that change.

    python -m benchmarks.models [--parts kills,memory,versions,changes] [--scale 1.0]

kills: `kill -9` of one model's engine 50 times, while both are under load; the gaps between the other's
tokens against those of undisturbed stretches of the same run, by turns. memory: of each engine against its
planned part, and what an idle model gives back. versions: 10,000 requests at 10%, and sessions. changes: an
injected fault until the fall-back, and the kill switch with streams running. `--scale` shortens counts for
a trial; what it writes then says so. Writes benchmarks/results/models-cpu.json, keeping the rows of other
parts.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import replace
from math import sqrt
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from benchmarks.findings import RESULTS, Rows, finding, report
from benchmarks.rude import metrics
from kvq.bench.engine.load import LoadRequest
from kvq.bench.serve.client import Sent, get, send
from kvq.bench.serve.process import ServerProcess
from kvq.bench.serve.serve import run_load
from kvq.bench.timing import percentile
from kvq.evals.report.results import source_commit
from kvq.server.models.config import read_rollouts
from kvq.server.models.state import StateFile

OUT = RESULTS / "models-cpu.json"
MOST_S = 1200  # of the kills
ENGINE = b"kvq.server.engine.worker"
MODELS = [
    {"name": "one", "model": "tiny", "kv": "int4", "max-num-seqs": 32},
    {"name": "two", "model": "tiny", "kv": "int8", "max-num-seqs": 32},
]
VERSIONS = [{"model": "one", "weight": 90}, {"model": "two", "weight": 10}]


class Models(ServerProcess):
    """Server of two embedded models, one of them maybe lazy, and a roll-out of both."""

    def __init__(self, folder: Path, *, second: dict[str, Any] | None = None, **rollout: Any) -> None:
        path = folder / "serve.json"  # JSON is YAML
        rollouts = {"chat": {"versions": VERSIONS, **rollout}}
        models = [MODELS[0], MODELS[1] | (second or {})]
        limits = {"max-restarts": 100_000, "max-queue": 100_000, "max-wait": 1e5, "max-kv-pressure": 1.0}
        path.write_text(json.dumps({**limits, "models": models, "rollouts": rollouts}))
        self.file = StateFile(path, read_rollouts(path, rollouts, ["one", "two"]))
        super().__init__(["--config", str(path)])

    @property
    def engines(self) -> list[int]:
        """Process ids of the engines, the oldest first."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return [int(one) for one in children if ENGINE in Path(f"/proc/{one}/cmdline").read_bytes()]

    def load(
        self, model: str, count: int, *, tokens: int, seed: int = 0
    ) -> Callable[[int], Coroutine[Any, Any, list[Sent]]]:
        """Return a function that lets a number of users send requests with random prompts to a model."""
        chance = random.Random(f"{model} {seed}")
        prompts = [[chance.randrange(3, 4096) for _ in range(8)] for _ in range(count)]
        requests = [LoadRequest(index=i, prompt=one, output_tokens=tokens) for i, one in enumerate(prompts)]
        return lambda users: run_load(replace(self.target, model=model), requests, users)

    async def state(self, model: str) -> str:
        """Return the state of a model, as /health tells it, however busy the machine is."""
        _, body = await get(self.target, "/health", timeout_s=600)
        return str(json.loads(body).get("models", {}).get(model))


async def kills(folder: Path, scale: float) -> Rows:
    """One model dies again and again; what do the clients of the other notice?"""
    count, began = max(2, round(50 * scale)), perf_counter()
    gaps: dict[str, list[float]] = {"undisturbed": [], "disturbed": []}
    broken, killed, turn = 0, 0, 0
    async with Models(folder) as server:
        while killed < count and perf_counter() - began < MOST_S * scale:
            turn += 1
            for kind in ("undisturbed", "disturbed") if turn % 2 else ("disturbed", "undisturbed"):
                is_over = asyncio.Event()
                users = [asyncio.create_task(_until(is_over, server, "one")) for _ in range(4)]
                others = [asyncio.create_task(_until(is_over, server, "two")) for _ in range(2)]
                stretch_s = perf_counter()
                while kind == "disturbed" and killed < min(count, 2 * turn):
                    await _kill(server)
                    killed += 1
                while kind == "undisturbed" and perf_counter() - stretch_s < 20:
                    await asyncio.sleep(0.5)
                is_over.set()
                sent = [one for each in await asyncio.gather(*users) for one in each]
                await asyncio.gather(*others)
                broken += sum(not one.is_complete for one in sent)
                for one in sent:
                    gaps[kind] += [b - a for a, b in zip(one.token_s, one.token_s[1:], strict=False)]
                print(f"  {kind}: {perf_counter() - stretch_s:.0f} s, {killed} kills", flush=True)
        seen = await metrics(server)
    p99, p50 = ({kind: 1e3 * percentile(own, at) for kind, own in gaps.items()} for at in (99, 50))
    ratio = p99["disturbed"] / p99["undisturbed"]
    restarts = {name: seen[f"kvq_engine_restarts_total/{name}"] for name in ("one", "two")}
    return [
        finding("kills of one model's engine", killed, "50", killed >= 50, restarts=restarts),
        finding("requests of the other model that broke", broken, "0", broken == 0),
        finding("the other's ITL p99, disturbed / undisturbed", ratio, "1.1", ratio <= 1.1,
                p99_ms=p99, p50_ms=p50, gaps={kind: len(own) for kind, own in gaps.items()}),
    ]  # fmt: skip


async def _kill(server: Models) -> None:
    """Kill the second model's engine while it generates, and wait for the next one."""
    await asyncio.sleep(0.5)
    os.kill(server.engines[-1], signal.SIGKILL)
    for is_ready in (False, True):
        while (await server.state("two") == "ready") is not is_ready:
            await asyncio.sleep(0.05)


async def _until(is_over: asyncio.Event, server: Models, model: str) -> list[Sent]:
    """Send one request after another until the event."""
    found, chance = list[Sent](), random.Random(f"{model} {perf_counter()}")
    while not is_over.is_set():
        prompt = [chance.randrange(3, 4096) for _ in range(8)]
        request = LoadRequest(index=0, prompt=prompt, output_tokens=60)
        found.append(await send(replace(server.target, model=model), request, perf_counter()))
        if found[-1].status != 200:  # the killed model's
            await asyncio.sleep(0.2)
    return found


async def memory(folder: Path, scale: float) -> Rows:
    """Engines against their plans, and a lazy model before it starts, while it runs and after it stopped."""
    rows = []
    async with Models(folder, second={"start": "lazy", "idle-s": 5}) as server:
        plans = dict(re.findall(r'"memory: ([\d.]+ [KMG]iB) for (\w+)', server.log))
        planned = {name: _bytes(size) for size, name in plans.items()}
        await server.load("one", 64, tokens=100)(32)
        before = _tree_bytes(server.process.pid)
        await server.load("two", 64, tokens=100)(32)
        during, engines = _tree_bytes(server.process.pid), server.engines
        for name, pid in zip(("one", "two"), engines, strict=True):
            found = _private_bytes(pid)
            rows.append(
                finding(
                    f"memory of {name}, MB",
                    found / 1e6,
                    f"planned {planned[name] / 1e6:.0f}",
                    found <= planned[name],
                )
            )
        while await server.state("two") != "stopped":
            await asyncio.sleep(0.2)
        await asyncio.sleep(3)
        after = _tree_bytes(server.process.pid)
    left = (after - before) / (during - before)
    rows.append(
        finding("memory that an idle model keeps, share of what it took", left, "0.05", left <= 0.05,
                before_mb=before / 1e6, during_mb=during / 1e6, after_mb=after / 1e6)
    )  # fmt: skip
    return rows


def _bytes(size: str) -> float:
    number, unit = size.split()
    return float(number) * float(1024) ** ("KMG".index(unit[0]) + 1)


def _private_bytes(pid: int) -> int:
    """Resident bytes of a process without files that it shares, such as libraries."""
    resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _tree_bytes(pid: int) -> int:
    """Proportional bytes of a process and all that it started."""
    own = int(re.findall(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)[0]) * 1024
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return own + sum(_tree_bytes(int(child)) for child in children)


async def versions(folder: Path, scale: float) -> Rows:
    """Weights and sessions."""
    count = max(100, round(10_000 * scale))
    async with Models(folder) as server:
        first = await server.load("chat", count, tokens=1)(8)
        share = await _share(server)
        again = await server.load("chat", count // 50, tokens=1)(8)  # sessions of before
        moved = await _share(server) - share
        expected = await _split(again, server)
        whole = sum(one.is_complete for one in first)
        off = (share - count / 10) / sqrt(count * 0.1 * 0.9)
        within = f"{count // 10} within 3 standard deviations"
        return [
            finding("requests answered", whole, f"{count}", whole == count),
            finding("requests of the version with 10%", share, within, abs(off) <= 3, deviations=off),
            finding("known sessions at that version", moved, f"{expected}, as before", moved == expected),
        ]


async def changes(folder: Path, scale: float) -> Rows:
    """A fault, and the kill switch."""
    limits = {"errors": 0.1, "window_s": 20.0, "least": 20}
    async with Models(folder, fall_back=limits) as server:
        await server.load("two", 1, tokens=1)(1)
        return [*await _fault(server), *await _kill_switch(server)]


async def _share(server: Models) -> int:
    return int((await metrics(server))["kvq_rollout_requests_total/chat/two"])


async def _split(sent: list[Sent], server: Models) -> int:
    """Return how many of these requests belong to the second version, one by one."""
    before, found = await _share(server), 0
    for one in sent:
        await send(replace(server.target, model="chat"), one.request, perf_counter())
        now = await _share(server)
        found, before = found + now - before, now
    return found


async def _fault(server: Models) -> Rows:
    """Kill one version's engine whenever it is there; how long until it gets no requests any more?"""
    server.file.set_weights("chat", {"one": 50, "two": 50}, "benchmark", "a fault follows")
    await asyncio.sleep(1)
    sending = asyncio.create_task(server.load("chat", 3_000, tokens=4, seed=1)(4))
    began = perf_counter()
    while server.file.read().weights["chat"]["two"]:
        for pid in server.engines[1:]:
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.1)
    seconds = perf_counter() - began
    at_fault = await _share(server)
    sent = await sending
    late = await _share(server) - at_fault
    failed = sum(not one.is_complete for one in sent)
    reason = json.loads(server.file.audit.read_text().splitlines()[-1])["reason"]
    return [
        finding("fault until the fall back, s", seconds, "30", seconds <= 30, failed=failed, reason=reason),
        finding("requests that the version got later", late, "0", late == 0),
    ]


async def _kill_switch(server: Models) -> Rows:
    while await server.state("two") != "ready":
        await asyncio.sleep(0.2)
    server.file.set_weights("chat", {"one": 50, "two": 50}, "benchmark", "")
    await asyncio.sleep(1)
    running = asyncio.create_task(server.load("two", 16, tokens=400)(16))
    sending = asyncio.create_task(server.load("chat", 2_000, tokens=1, seed=2)(4))
    while (await metrics(server)).get("kvq_engine_requests/two/running", 0) < 16:
        await asyncio.sleep(0.05)
    server.file.stop("two", "benchmark", "kill switch")
    began = last = perf_counter()
    found = await _share(server)
    while perf_counter() - began < 5:
        now = await _share(server)
        if now != found:
            found, last = now, perf_counter()
        await asyncio.sleep(0.02)
    streams, others = await running, await sending
    whole = sum(one.is_complete for one in streams)
    lost = sum(not one.is_complete for one in others)
    errors = [f"{one.status} {one.error}" for one in (*streams, *others) if not one.is_complete]
    return [
        finding("stop until the last new request, s", last - began, "1", last - began <= 1),
        finding(
            "streams of the stopped version that ran on to their end", whole, "16", whole == 16, errors=errors
        ),
        finding("requests for the name that failed meanwhile", lost, "0", lost == 0),
    ]


PARTS = {"kills": kills, "memory": memory, "versions": versions, "changes": changes}


def main() -> None:
    """Run the parts, and write what they found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    source_commit()
    for part in given.parts.split(","):
        with tempfile.TemporaryDirectory() as folder:
            _add(given.out, part, asyncio.run(PARTS[part](Path(folder), given.scale)), given.scale)


def _add(out: Path, part: str, found: Rows, scale: float) -> None:
    """Write a part's rows in place of former ones of the same findings."""
    names = {row["what"] for row in found}
    kept = [] if not out.exists() else msgspec.json.decode(out.read_bytes())["rows"]
    more = {"part": part, "load_average": os.getloadavg()[0], "scale": scale}
    report(out, [*(row for row in kept if row["what"] not in names), *({**more, **row} for row in found)])


if __name__ == "__main__":
    main()
