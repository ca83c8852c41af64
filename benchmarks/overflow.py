"""Overflow: a server under more load than it takes, alone and with an upstream on loopback.

    python -m benchmarks.overflow [--requests 160] [--per-s 8] [--price 0.6] [--out FILE]

The server has the embedded model, few slots and a short queue; half of the requests have batch priority.
Three runs with the same arrivals: without an upstream, with one for batch requests, with one for all. The
upstream waits half a second and streams as many tokens as were asked for. Reported are answers, refusals, the
share that went on, its tokens, and what they cost at `--price` dollars a million.
Writes benchmarks/results/overflow-cpu.json.
"""

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import httpx2

from benchmarks.findings import RESULTS, Rows, finding, report
from benchmarks.rude import metrics
from kvq.bench.serve.process import ServerProcess, free_port
from kvq.evals.report.results import source_commit

_SERVER = ("--model", "tiny", "--kv", "int4", "--num-blocks", "64", "--max-num-seqs", "2", "--max-queue", "4")
_TOKENS = 64
_UPSTREAM_S = 0.5  # until its first token
_HEADER = "x-kvq-overflow"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer requests of one connection, one after the other, with streams."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            [length] = [
                int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
            ]
            body = json.loads(await reader.readexactly(length))
            await asyncio.sleep(_UPSTREAM_S)
            chunks: list[Any] = [
                {"choices": [{"index": 0, "text": " sea"}]} for _ in range(body["max_tokens"])
            ]
            prompt = len(body["prompt"]) // 4
            chunks.append(
                {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"]}}
            )
            lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
            content = lines.encode()
            said = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {len(content)}"
            writer.write(said.encode() + b"\r\n\r\n" + content)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _ask(client: httpx2.AsyncClient, is_batch: bool) -> tuple[bool, int, bool, float]:
    """Whether a request had batch priority, its status, whether the upstream took it, and its seconds."""
    body = {"prompt": "The history of the city", "max_tokens": _TOKENS, "ignore_eos": True, "stream": True}
    body["priority"] = "batch" if is_batch else "interactive"
    began = perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        text = (await answer.aread()).decode()
    is_whole = answer.status_code != 200 or text.rstrip().endswith("[DONE]")
    status = answer.status_code if is_whole else 0
    return is_batch, status, _HEADER in answer.headers, perf_counter() - began


async def _run(name: str, options: tuple[str, ...], requests: int, per_s: float, price: float) -> Rows:
    odds = random.Random(1)
    async with ServerProcess([*_SERVER, "--log-level", "warning", *options]) as server:
        url = f"http://{server.target.host}:{server.target.port}"
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:
            tasks = []
            for _ in range(requests):
                tasks.append(asyncio.create_task(_ask(client, odds.random() < 0.5)))
                await asyncio.sleep(odds.expovariate(per_s))
            found = await asyncio.gather(*tasks)
        counted = await metrics(server)
    tokens = sum(count for key, count in counted.items() if key.startswith("kvq_overflow_tokens_total"))
    statuses = Counter(status for _, status, _, _ in found)
    taken = sum(is_taken for _, _, is_taken, _ in found)
    refused = {kind: sum(s == 503 for b, s, _, _ in found if b == kind) for kind in (False, True)}
    here = [seconds for _, status, is_taken, seconds in found if status == 200 and not is_taken]
    may_refuse = {"none": 2, "batch": 1, "all": 0}[name]
    return [
        finding(f"{name}: statuses", dict(statuses), "200 or 503", not statuses.keys() - {200, 503}),
        finding(
            f"{name}: refused, interactive",
            refused[False],
            "0 with all",
            not refused[False] or may_refuse > 0,
        ),
        finding(
            f"{name}: refused, batch",
            refused[True],
            "0 with an upstream",
            not refused[True] or may_refuse > 1,
        ),
        finding(f"{name}: share that went on", round(taken / requests, 3), "", True),
        finding(f"{name}: tokens there", tokens, "", tokens == 0 or tokens >= taken * _TOKENS),
        finding(
            f"{name}: dollars per 1,000 requests", round(tokens * price / 1e6 / requests * 1000, 6), "", True
        ),
        finding(f"{name}: median s of requests served here", round(median(here), 3), "", True),
    ]


async def _all(requests: int, per_s: float, price: float) -> Rows:
    port, rows = free_port(), []
    upstream = await asyncio.start_server(_answer, "127.0.0.1", port)
    async with upstream:
        there = ("--overflow-to", f"http://127.0.0.1:{port}/v1", "--overflow-concurrency", "256")
        for name, options in (("none", ()), ("batch", there), ("all", (*there, "--overflow", "all"))):
            rows += await _run(name, options, requests, per_s, price)
    return rows


def main() -> None:
    """Run all three, and write what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--per-s", type=float, default=8.0)
    parser.add_argument("--price", type=float, default=0.6)
    parser.add_argument("--out", type=Path, default=RESULTS / "overflow-cpu.json")
    given = parser.parse_args()
    source_commit()
    rows = asyncio.run(_all(given.requests, given.per_s, given.price))
    load = {"requests": given.requests, "per_s": given.per_s, "price": given.price, "tokens": _TOKENS}
    sys.exit(not report(given.out, rows, load=load))


if __name__ == "__main__":
    main()
