"""`kvq bench serve`: servers under load over HTTP, measured alternately.

Each request is sent at its arrival time, or a fixed number of users send one request after another.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from kvq.bench.engine.load import Load, LoadRequest, Served, ServedLoad, row
from kvq.bench.serve.client import Endpoint, Leave, Sent, first_model, send
from kvq.bench.serve.process import ServerProcess
from kvq.bench.timing import in_turn, percentile
from kvq.errors import ConfigError, EngineError
from kvq.evals.watch import Watch

MakeLoad = Callable[..., Load]  # takes `vocab_size` and `max_context`
_Rows = list[dict[str, Any]]


async def run_load(
    target: Endpoint,
    requests: Sequence[LoadRequest],
    users: int | None,
    *,
    leave: Callable[[LoadRequest], Leave | None] = lambda request: None,
    step: Callable[[], object] = lambda: None,
) -> list[Sent]:
    """Send all requests as they arrive, or `users` at a time, and return results in the order of `requests`.

    `leave` returns a function that disconnects a request's client early, or None. `step` is called after each
    request.
    """
    began = perf_counter()

    async def one(request: LoadRequest, due_s: float) -> Sent:
        sent = await send(target, request, due_s, leave(request))
        step()
        return sent

    if users is None:
        tasks = []
        for request in requests:
            await asyncio.sleep(max(0.0, began + request.arrival_s - perf_counter()))
            tasks.append(asyncio.create_task(one(request, began + request.arrival_s)))
        return list(await asyncio.gather(*tasks))
    results: dict[int, Sent] = {}
    waiting = iter(requests)

    async def user() -> None:
        for request in waiting:
            results[request.index] = await one(request, perf_counter())

    await asyncio.gather(*(user() for _ in range(users)))
    return [results[request.index] for request in requests]


def as_served(sent: Sequence[Sent]) -> ServedLoad:
    """Return the completed requests in the form used by `kvq bench engine`."""
    begin = min(one.due_s for one in sent)
    return ServedLoad(
        served=[
            Served(
                request=replace(one.request, arrival_s=one.due_s - begin),
                due_s=one.due_s - begin,
                token_s=[at - begin for at in one.token_s],
            )
            for one in sent
            if one.is_complete
        ]
    )


def outcomes(sent: Sequence[Sent]) -> dict[str, Any]:
    """Return the number of requests with each outcome, and the latency of refusals."""
    refused = [one for one in sent if one.status in (429, 503)]
    waits = [one.end_s - one.due_s for one in refused]
    polite_ones = [one for one in sent if one.leave is None]
    return {
        "sent": len(sent),
        "complete": sum(one.is_complete for one in sent),
        "refused": len(refused),
        "unanswered": sum(one.status == 0 for one in polite_ones),
        "broken": sum(one.status == 200 and not one.is_complete for one in polite_ones),
        "other": sum(one.status not in (0, 200, 429, 503) for one in sent),
        "refusal_ms_p50": 1e3 * percentile(waits, 50) if waits else None,
        "refusal_ms_p99": 1e3 * percentile(waits, 99) if waits else None,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Server:
    """Server to measure, with the name used in its row."""

    name: str
    kv: str
    target: Endpoint


async def bench_url(url: str, key: str, measure: Callable[..., Awaitable[_Rows]]) -> _Rows:
    """Measure a running server, and return its row. `measure`: see `measure_servers`.

    Raises:
        ConfigError: no kvq server responds at the URL.
        EngineError: no request is completed.
    """
    target = Endpoint.from_url(url, key=key)
    try:
        model = await first_model(target)
    except EngineError as error:
        raise ConfigError(f"{url} lists no models: {error}") from error
    except (OSError, EOFError, TimeoutError, ValueError) as error:
        raise ConfigError(f"no server answers at {url}: {error}") from error
    if any(type(model.get(name)) is not int for name in ("vocab_size", "max_model_len")):
        raise ConfigError(f"{url} is no kvq server: it does not tell its vocabulary's size")
    server = _Server(name=url, kv="?", target=replace(target, model=model["id"]))
    return await measure([server], model)


async def bench_serve(
    formats: Sequence[str], options: Sequence[str], measure: Callable[..., Awaitable[_Rows]], *, pin: bool
) -> _Rows:
    """Start a server for each format, and measure the servers alternately. `options`: options of `kvq serve`.

    `measure`: see `measure_servers`. With `pin`, this process and the HTTP processes share one core, and the
    engines use the other cores.

    Raises:
        EngineError: a server does not start, or no request is completed.
    """
    async with AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(
                ServerProcess([*options, "--kv", kv, "--log-level", "warning"], pin=pin)
            )
            for kv in formats
        ]
        servers = [
            _Server(name="kvq serve", kv=kv, target=process.target)
            for kv, process in zip(formats, processes, strict=True)
        ]
        return await measure(servers, processes[0].model)


async def measure_servers(
    servers: Sequence[_Server],
    model: dict[str, Any],
    *,
    make_load: MakeLoad,
    users: int | None,
    repeats: int,
    watch: Watch,
) -> _Rows:
    """Measure a model's servers alternately. `users`: concurrent clients, or None to use arrival times."""
    load = make_load(vocab_size=model["vocab_size"], max_context=model["max_model_len"])
    done, total = itertools.count(1), len(servers) * repeats * load.num_requests
    sent: dict[_Server, list[list[Sent]]] = {server: [] for server in servers}
    alone = {server: await _send_alone(server.target, load) for server in servers}

    def rows(of: Iterable[_Server] = servers) -> _Rows:
        return [
            _row(server, sent[server], users) | {"check_equal": sent[server][0][0].text == alone[server].text}
            for server in of
        ]

    def so_far() -> _Rows:
        return rows(
            server for server, runs in sent.items() if any(one.is_complete for run in runs for one in run)
        )

    for repeat, server in in_turn(servers, repeats):
        requests = load.draw(repeat)
        run = await run_load(server.target, requests, users, step=lambda: watch.progress(next(done), total))
        sent[server].append(run)
        watch.keep(so_far)
        await asyncio.sleep(0.2)  # lets the server finish its work
    return rows()


async def _send_alone(target: Endpoint, load: Load) -> Sent:
    """Send the first request alone, for comparison with its text under load, or raise EngineError."""
    sent = await send(target, load.draw(0)[0], perf_counter())
    if not sent.is_complete:
        raise EngineError(f"a single request fails with status {sent.status}: {sent.error}")
    return sent


def _row(server: _Server, runs: Sequence[Sequence[Sent]], users: int | None) -> dict[str, Any]:
    complete = [served for served in map(as_served, runs) if served.served]
    if not complete:
        reasons = {one.error for run in runs for one in run}
        raise EngineError(
            f"{server.name} completed no request: {'; '.join(map(str, sorted(reasons, key=str)))}"
        )
    return row(server.name, server.kv, complete, users) | outcomes([one for run in runs for one in run])
