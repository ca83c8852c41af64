"""Reliability of the server: rude clients, overload, dying engines, slow readers, and a long time.

    python -m benchmarks.reliability [--parts rude,overload,...] [--scale 1.0] [--model DIR] [--neighbours N]

rude: 10,000 requests on a pool of 64 blocks, of which 30% are reset and 10% stall. overload: ten times the
load that the server can serve, for 120 s. kills: `kill -9` of the engine mid-stream, 100 times. stops:
SIGSTOP of the engine, 20 times. drain: SIGTERM with 200 streams. stalled: 500 readers who stop, beside
8 who don't. overhead: 16 streams over HTTP beside the engine alone; needs --model, a folder made by
tools/make_bench_model.py. soak: an hour of mixed load. Client and HTTP process share one core, the engine has
the other; `--neighbours` runs so many busy processes beside all of them. `--scale` shortens counts and times
for a trial; what it writes then says so. Each part writes benchmarks/results/reliability-<part>-cpu.json, or
reliability-<part>-beside-<N>-cpu.json, whose rows say what was asked and what was found.
"""

import argparse
import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch

from benchmarks.findings import NO_BOUNDS, RESULTS, Rows, finding, report
from benchmarks.peers.neighbours import neighbours
from benchmarks.rude import memory_bytes, metrics, num_sockets, some_rude, stall
from kvq.bench.engine.load import Load, LoadRequest
from kvq.bench.serve.client import Sent, send
from kvq.bench.serve.process import ServerProcess
from kvq.bench.serve.serve import as_served, outcomes, run_load
from kvq.bench.timing import percentile
from kvq.capacity.lengths import Lengths
from kvq.evals.report.results import source_commit


@dataclass(frozen=True)
class Run:
    """Options of the command line."""

    scale: float
    model: str | None

    def count(self, full: int) -> int:
        """Return a scaled number, at least 2."""
        return max(2, round(full * self.scale))

    def seconds(self, full: float) -> float:
        """Return a scaled duration."""
        return full * self.scale


def tiny_server(*options: str, kv: str = "int4") -> ServerProcess:
    """The embedded model."""
    return ServerProcess(["--model", "tiny", "--kv", kv, "--log-level", "warning", *options], pin=True)


def a_load(
    server: ServerProcess, count: int, prompt: Lengths, output: Lengths, *, repeat: int = 0, **more: Any
) -> list[LoadRequest]:
    """Random requests for a server's model."""
    load = Load(
        num_requests=count,
        input_lengths=prompt,
        output_lengths=output,
        vocab_size=server.model["vocab_size"],
        max_context=server.model["max_model_len"],
        **more,
    )
    return load.draw(repeat)


async def leaks(server: ServerProcess, sockets: int) -> Rows:
    """Return what is left five seconds after a load."""
    await asyncio.sleep(5)
    seen = await metrics(server)
    requests = _num_requests(seen)
    live = sum(
        value for name, value in seen.items() if name.startswith("kvq_blocks/") and name.endswith("/live")
    )
    tasks = seen["kvq_http_tasks"]
    left = num_sockets(server) - sockets
    return [
        finding("requests left at the engine", requests, "0", requests == 0),
        finding("live blocks left", live, "0", live == 0),
        finding("sockets left", max(0, left), "0", left <= 0),
        finding("tasks of the HTTP process", tasks, "at most 12, as when idle", tasks <= 12),
    ]


async def rude(run: Run) -> Rows:
    """Clients that reset and stall."""
    async with tiny_server("--num-blocks", "64", *NO_BOUNDS) as server:
        await metrics(server)
        sockets = num_sockets(server)
        requests = a_load(server, run.count(10_000), Lengths(low=1, high=64), Lengths(low=1, high=32))
        leave = some_rude(resets=0.3, stalls=0.1, stall_s=2.0, seed=1)
        sent = await run_load(server.target, requests, 48, leave=leave)
        ends = outcomes(sent)
        polite = [one for one in sent if one.leave is None]
        complete = sum(one.is_complete for one in polite)
        return [
            finding("requests sent", len(sent), "10,000", True, **ends),
            finding("polite clients served", complete, f"all {len(polite)}", complete == len(polite)),
            *await leaks(server, sockets),
        ]


async def overload(run: Run) -> Rows:
    """Ten times what can be served."""
    seats = 16
    options = ("--num-blocks", "512", "--max-num-seqs", f"{seats}", "--max-queue", "32", "--max-wait", "5")
    async with tiny_server(*options) as server:
        lengths = Lengths(low=96, high=160), Lengths(low=96, high=160)
        probe = await run_load(server.target, a_load(server, run.count(150), *lengths), 20)
        rate = len(probe) / as_served(probe).seconds
        seconds = run.seconds(120)

        async def serve(factor: float) -> list[Sent]:
            count = max(20, round(factor * rate * seconds))
            return await run_load(server.target, a_load(server, count, *lengths, rate=factor * rate), None)

        once = await serve(1.0)
        seen: list[float] = []
        watching = asyncio.create_task(_watch_requests(server, seen))
        tenfold = await serve(10.0)
        if not watching.cancel():
            watching.result()  # what ended it

        async def light(seconds: float) -> list[float]:
            """TTFT of what comes at a third of the rate, after ten seconds of the same."""
            began = perf_counter()
            count = round(0.3 * rate * (10 + seconds))
            sent = await run_load(server.target, a_load(server, count, *lengths, rate=0.3 * rate), None)
            late = [one for one in sent if one.due_s - began >= 10]
            return [one.ttft_s for one in as_served(late).served]

        after = await light(20)
        await asyncio.sleep(10)
        calm = await light(20)
    goodput = [sum(len(one.token_s) for one in load if one.is_complete) / seconds for load in (once, tenfold)]
    ends = outcomes(tenfold)
    ttft = [percentile(seconds, 50) for seconds in (calm, after)]
    return [
        finding("rate that can be served, requests/s", rate, "", True, **outcomes(once)),
        finding("sent at ten times that", ends["sent"], "120 s", True, **ends),
        finding("most requests without a seat", max(seen) - seats, "within 32", max(seen) <= seats + 32),
        finding("refusals, p99 ms", ends["refusal_ms_p99"], "below 50", ends["refusal_ms_p99"] < 50),
        finding("requests not answered", ends["unanswered"] + ends["broken"], "0", not ends["unanswered"]),
        finding(
            "goodput at 10x / 1x, tokens/s", goodput[1] / goodput[0], "0.9", goodput[1] >= 0.9 * goodput[0],
            once=goodput[0], tenfold=goodput[1],
        ),
        finding(
            "TTFT 10 s after, p50 ms", 1e3 * ttft[1], "as when calm", ttft[1] <= 1.5 * ttft[0],
            calm=1e3 * ttft[0],
        ),
    ]  # fmt: skip


async def _watch_requests(server: ServerProcess, seen: list[float]) -> None:
    """Requests at the engine, whatever their state: between two steps some wait for seats that are free."""
    while True:
        seen.append(_num_requests(await metrics(server)))
        await asyncio.sleep(0.5)


def _num_requests(seen: dict[str, float]) -> float:
    return sum(seen[f"kvq_engine_requests/{state}"] for state in ("running", "waiting", "preempted"))


async def _break_engine(run: Run, count: int, signal_number: signal.Signals) -> Rows:
    """Break the engine while streams run, so many times."""
    async with tiny_server("--num-blocks", "256", "--max-restarts", "1000") as server:
        cold = await _cold_start_s()
        told: list[float] = []
        ready: list[float] = []
        wrong = 0
        for _ in range(count):
            requests = a_load(server, 4, Lengths(low=8, high=8), Lengths(low=1000, high=1000))
            tasks = [asyncio.create_task(send(server.target, one, perf_counter())) for one in requests]
            await asyncio.sleep(0.5)
            broken_s = perf_counter()
            os.kill(server.engine_pid, signal_number)
            sent = await asyncio.gather(*tasks)
            told += [one.end_s - broken_s for one in sent]
            wrong += sum(not (one.status == 200 and one.error) for one in sent)
            await server.wait_ready(60)
            ready.append(perf_counter() - broken_s)
        alive = server.process.poll() is None
    stall_s = 0.0 if signal_number == signal.SIGKILL else 4.5
    return [
        finding(f"{signal_number.name} survived", count, f"all {count}", alive),
        finding("streams that did not end with an error object", wrong, "0", wrong == 0, streams=4 * count),
        finding(
            "error objects, longest s", max(told), f"1 after the end is known ({stall_s} s)",
            max(told) < 1 + stall_s, median=median(told),
        ),
        finding(
            "ready again, longest s", max(ready), f"5 + {cold:.1f} of start and load", max(ready) < 5 + cold,
            median=median(ready), start_and_load_s=cold,
        ),
    ]  # fmt: skip


async def _cold_start_s() -> float:
    """Interpreter start and model load: a second server from nothing, beside an idle one."""
    began = perf_counter()
    async with tiny_server("--num-blocks", "256"):
        return perf_counter() - began


async def kills(run: Run) -> Rows:
    """SIGKILL."""
    return await _break_engine(run, run.count(100), signal.SIGKILL)


async def stops(run: Run) -> Rows:
    """SIGSTOP."""
    return await _break_engine(run, run.count(20), signal.SIGSTOP)


async def drain(run: Run) -> Rows:
    """SIGTERM with streams running."""
    count = run.count(200)
    async with tiny_server("--num-blocks", "2048", "--max-num-seqs", "256", *NO_BOUNDS) as server:
        requests = a_load(server, count, Lengths(low=8, high=8), Lengths(low=48, high=48))
        tasks = [asyncio.create_task(send(server.target, one, perf_counter())) for one in requests]
        while (await metrics(server)).get("kvq_engine_requests/running", 0) < count:
            await asyncio.sleep(0.05)
        began = perf_counter()
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        late = await send(server.target, requests[0], perf_counter())
        sent = await asyncio.gather(*tasks)
        await asyncio.to_thread(server.process.wait, 60)
        seconds, status = perf_counter() - began, server.process.returncode
    complete = sum(one.is_complete for one in sent)
    return [
        finding(
            "streams complete after SIGTERM", complete, f"all {count}", complete == count, seconds=seconds
        ),
        finding("a new request meanwhile", late.status, "503", late.status == 503),
        finding("exit status", status, "0", status == 0),
    ]


async def stalled(run: Run) -> Rows:
    """Readers who stop reading, beside some who don't."""
    count = run.count(500)
    options = ("--num-blocks", "2048", "--max-num-seqs", "64", *NO_BOUNDS)
    async with tiny_server(*options) as server:

        async def eight() -> list[float]:
            few = a_load(server, 8, Lengths(low=8, high=8), Lengths(low=400, high=400))
            return [
                gap for one in as_served(await run_load(server.target, few, 8)).served for gap in one.itl_s
            ]

        await eight()
        before_bytes = memory_bytes(server)["http"]
        alone = await eight()
        many = a_load(server, count, Lengths(low=4, high=4), Lengths(low=200, high=200))
        stalling = asyncio.create_task(
            run_load(server.target, many, None, leave=lambda _: stall(run.seconds(120)))
        )
        while (await metrics(server)).get("kvq_requests_total/success", 0) < count:
            await asyncio.sleep(0.5)
            if stalling.done():
                break
        beside = await eight()
        grown = (memory_bytes(server)["http"] - before_bytes) / 1e6
        open_sockets = num_sockets(server)
        stalling.cancel()
    p99 = [1e3 * percentile(gaps, 99) for gaps in (alone, beside)]
    return [
        finding("stalled readers", count, "500", True, sockets=open_sockets),
        finding(
            "others' ITL, p99 ms",
            p99[1],
            "1.25x",
            p99[1] <= 1.25 * p99[0],
            alone=p99[0],
            ratio=p99[1] / p99[0],
        ),
        finding("memory of the HTTP process, MB more", grown, "50", grown <= 50),
    ]


async def overhead(run: Run) -> Rows:
    """HTTP beside the engine alone: 16 at a time, lengths mixed, so that both are in full swing."""
    if run.model is None:
        raise SystemExit("overhead needs --model, a folder made by tools/make_bench_model.py")
    from kvq.bench.engine.load import ServedLoad
    from kvq.bench.engine.server import KvqServer
    from kvq.engine import EngineConfig
    from kvq.models import load

    cores = sorted(os.sched_getaffinity(0))
    options = ["--model", run.model, "--kv", "int4", "--kv-memory", "1GiB", "--log-level", "warning"]
    lengths = Lengths(low=32, high=96)
    runs: dict[str, list[ServedLoad]] = {"engine": [], "serve": []}
    async with ServerProcess(options, pin=True) as server:
        torch.set_num_threads(max(1, len(cores) - 1))
        os.sched_setaffinity(0, cores[1:])
        draws = [a_load(server, 48, lengths, lengths, repeat=i) for i in range(run.count(5))]
        alone = KvqServer(load(run.model, "int4"), "int4", EngineConfig(kv_memory="1GiB"), draws[0])
        for repeat, drawn in enumerate(draws):
            for name in ("engine", "serve") if repeat % 2 else ("serve", "engine"):
                os.sched_setaffinity(0, cores[1:] if name == "engine" else cores[:1])
                if name == "engine":
                    runs[name].append(alone.run(drawn, 16))
                else:
                    runs[name].append(as_served(await run_load(server.target, drawn, 16)))
        alone.close()
        seen = await metrics(server)
    speed = {name: median(one.output_tokens_per_s for one in loads) for name, loads in runs.items()}
    ttft = {name: fmean(s.ttft_s for one in loads for s in one.served) for name, loads in runs.items()}
    inside = seen["kvq_ttft_seconds_sum"] / seen["kvq_ttft_seconds_count"]
    more = 1e3 * (ttft["serve"] - inside)
    ratio = speed["serve"] / speed["engine"]
    return [
        finding("tokens/s of the server / the engine's", ratio, "0.85", ratio >= 0.85, **speed),
        finding(
            "mean TTFT of clients beyond the engine's own, ms", more, "10", more <= 10,
            inside_ms=1e3 * inside, serve_ms=1e3 * ttft["serve"], engine_alone_ms=1e3 * ttft["engine"],
        ),
    ]  # fmt: skip


async def soak(run: Run) -> Rows:
    """A long time."""
    seconds = run.seconds(3600)
    memory: list[dict[str, int]] = []
    gaps: list[list[float]] = []
    failed = 0
    async with tiny_server("--num-blocks", "256", *NO_BOUNDS) as server:
        sockets = num_sockets(server)
        began = perf_counter()
        index = 0
        while perf_counter() - began < seconds:
            requests = a_load(server, 200, Lengths(low=1, high=300), Lengths(low=1, high=100), seed=index)
            index += 1
            leave = some_rude(resets=0.1, stalls=0.05, stall_s=1.0, seed=index)
            sent = await run_load(server.target, requests, 12, leave=leave)
            failed += sum(one.leave is None and not one.is_complete for one in sent)
            gaps.append([gap for one in as_served(sent).served for gap in one.itl_s])
            memory.append(memory_bytes(server))
        left = await leaks(server, sockets)
    tenth = max(1, len(gaps) // 10)
    first, last = gaps[tenth : 2 * tenth] or gaps[:1], gaps[-tenth:]
    p99 = [1e3 * percentile([gap for part in parts for gap in part], 99) for parts in (first, last)]
    growth = {
        name: median(m[name] for m in memory[-tenth:])
        / median(m[name] for m in memory[tenth : 2 * tenth] or memory)
        for name in ("http", "engine")
    }
    return [
        finding("seconds of mixed load", perf_counter() - began, "3600", True, requests=200 * index),
        finding("polite requests that failed", failed, "0", failed == 0),
        finding(
            "memory, last tenth / second",
            growth,
            "within 2%",
            all(abs(g - 1) <= 0.02 for g in growth.values()),
            megabytes={name: [round(m[name] / 1e6) for m in memory[::tenth]] for name in growth},
        ),
        finding("ITL p99, last tenth / second", p99[1] / p99[0], "1.05", p99[1] <= 1.05 * p99[0], ms=p99),
        *left,
    ]


PARTS: dict[str, Callable[[Run], Awaitable[Rows]]] = {
    "rude": rude,
    "overload": overload,
    "kills": kills,
    "stops": stops,
    "drain": drain,
    "stalled": stalled,
    "overhead": overhead,
    "soak": soak,
}


def main() -> None:
    """Run the parts and write what they found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="rude,overload,kills,stops,drain,stalled")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--model")
    parser.add_argument("--neighbours", type=int, default=0, metavar="N")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    source_commit()
    run = Run(given.scale, given.model)
    for part in given.parts.split(","):
        began = perf_counter()
        with neighbours(given.neighbours):
            rows = asyncio.run(PARTS[part](run))
        seconds = perf_counter() - began
        print(f"{part}: {seconds:.0f} s")
        beside = f"-beside-{given.neighbours}" if given.neighbours else ""
        more = {"scale": run.scale, "seconds": seconds, "neighbours": given.neighbours}
        report(given.out / f"reliability-{part}{beside}-cpu.json", rows, **more)


if __name__ == "__main__":
    main()
