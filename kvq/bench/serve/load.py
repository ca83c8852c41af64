"""Load over HTTP: each request at its time, or a fixed number of users at a time."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from kvq.bench.engine.load import LoadRequest
from kvq.bench.engine.result import Served, ServedLoad
from kvq.bench.serve.client import Endpoint, Leave, Sent, send
from kvq.bench.timing import percentile


async def run_load(
    target: Endpoint,
    requests: Sequence[LoadRequest],
    users: int | None,
    *,
    leave: Callable[[LoadRequest], Leave | None] = lambda request: None,
    step: Callable[[], object] = lambda: None,
) -> list[Sent]:
    """Send all requests, as they arrive or `users` at a time; returns results in the order of `requests`.

    `leave`: how a request's client leaves early; None: it reads to the end. `step` is called after each.
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
    """Return the complete requests in the form of `kvq bench engine`."""
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
    """Count how requests ended, with the latency of refusals."""
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
