"""Engine introspection: records recent requests, and takes snapshots for the web page on demand."""

from collections import deque
from collections.abc import Iterable
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any

from kvq.engine.requests.outputs import RequestOutput
from kvq.engine.requests.request_state import Job
from kvq.engine.steps.core import EngineCore
from kvq.layout import GroupLayout
from kvq.scheduler.request import RequestState
from kvq.server.engine.messages import EngineSnapshot
from kvq.server.engine.pool_snapshot import MAX_OWNERS, take_snapshot

_MAX_CELLS = 1 << 17  # maximum number of blocks of a pool in a snapshot
_MAX_REQUESTS = 32  # maximum number of live, and of ended, requests per tenant
_MAX_GAPS = 4096  # maximum number of inter-token times per tenant
_MAX_TENANTS = MAX_OWNERS + 1  # recorded tenants; the last one stands for all others


class _Memory:
    """Recently ended requests of one tenant."""

    def __init__(self) -> None:
        self.past: deque[dict[str, Any]] = deque(maxlen=_MAX_REQUESTS)
        self.ttft_s: deque[float] = deque(maxlen=8 * _MAX_REQUESTS)
        self.itl_s: deque[float] = deque(maxlen=_MAX_GAPS)

    def latency(self) -> dict[str, Any]:
        """Return latency percentiles of the recorded requests, in seconds or None if not measured."""
        ttft, itl = sorted(self.ttft_s), sorted(self.itl_s)
        of_ttft = {f"ttft_p{percent}": _percentile(ttft, percent) for percent in (50, 95)}
        of_itl = {f"itl_p{percent}": _percentile(itl, percent) for percent in (50, 95, 99)}
        return {"requests": len(ttft), **of_ttft, **of_itl}


class Introspection:
    """Recorder of recent requests and inter-token times of an engine process; also takes snapshots."""

    def __init__(self) -> None:
        self._memories: dict[str, _Memory] = {}
        self._gaps_s: list[float] = []  # inter-token times since the last `take_gaps_s`
        self._num_taken: dict[int, int] = {}  # number of gaps already returned, per running request

    def meet(self, tenant: str) -> None:
        """Register the tenant of a new request."""
        if tenant not in self._memories and len(self._memories) < _MAX_TENANTS:
            self._memories[tenant] = _Memory()

    def ended(self, number: int, tenant: str | None, output: RequestOutput) -> None:
        """Record the end of a request. `tenant` is None for a refused request."""
        timing = output.timing
        self._gaps_s += timing.itl_s[self._num_taken.pop(number, 0) :]
        memory = self._memories.get(tenant) if tenant is not None else None
        if memory is None:
            return
        memory.itl_s.extend(timing.itl_s)
        if timing.ttft_s is not None:
            memory.ttft_s.append(timing.ttft_s)
        memory.past.appendleft(
            {
                "number": number,
                "tenant": tenant,
                "finish_reason": "error" if output.error is not None else output.outputs[0].finish_reason,
                "receipt": output.receipt,
                "queue_s": timing.queue_s,
                "ttft_s": timing.ttft_s,
                "itl_s": median(timing.itl_s) if timing.itl_s else None,
                "e2e_s": timing.e2e_s,
            }
        )

    def take_gaps_s(self, jobs: dict[int, Job]) -> list[float]:
        """Return the inter-token times of all requests since the last call."""
        for number, job in jobs.items():
            if found := job.timing.itl_s:
                self._gaps_s += found[self._num_taken.get(number, 0) :]
                self._num_taken[number] = len(found)
        gaps, self._gaps_s = self._gaps_s, []
        return gaps

    def look(self, core: EngineCore, jobs: dict[int, Job]) -> EngineSnapshot:
        """Return a snapshot of the engine, in O(blocks); large pools are sampled."""
        began = perf_counter()
        pools = self._pools(core)
        tenants = self._tenants(jobs.values())
        live = [_live(number, job, began) for number, job in self._oldest(jobs)]
        past = [request for memory in self._memories.values() for request in memory.past]
        return EngineSnapshot(
            cost_s=perf_counter() - began,
            kv=core.model.recipe.name,
            block_size=core.model.layout.block_size,
            pools=pools,
            guard=None if core.upkeep.guard is None else core.upkeep.guard.facts(),
            tenants=tenants,
            live=live,
            past=past,
        )

    def _pools(self, core: EngineCore) -> list[dict[str, Any]]:
        manager, names = core.scheduler.manager, list(self._memories)
        stride = ceil(max(pool.num_blocks for pool in manager.pools) / _MAX_CELLS)
        return [
            {
                "cells": cells,  # one byte for every `stride`-th block, see `kvq.server.engine.pool_snapshot`
                "stride": stride,
                "usage": pool.usage(),
                "window": layout.group.window,  # tokens; None: full attention
                "block_bytes": layout.block_bytes,
                "parts": _parts(layout),
            }
            for cells, pool, layout in zip(
                take_snapshot(manager, names, stride=stride),
                manager.pools,
                core.model.layout.groups,
                strict=True,
            )
        ]

    def _tenants(self, jobs: Iterable[Job]) -> list[dict[str, Any]]:
        counts = {tenant: [0, 0] for tenant in self._memories}
        for job in jobs:
            if job.tenant in counts:
                counts[job.tenant][job.state is not RequestState.RUNNING] += 1
        return [
            {
                "name": name,
                "running": running,
                "waiting": waiting,  # including preempted ones
                "latency": self._memories[name].latency(),
            }
            for name, (running, waiting) in counts.items()
        ]

    def _oldest(self, jobs: dict[int, Job]) -> Iterable[tuple[int, Job]]:
        shown = dict.fromkeys(self._memories, 0)
        for number, job in jobs.items():
            tenant = job.tenant
            if shown.get(tenant, _MAX_REQUESTS) < _MAX_REQUESTS:
                shown[tenant] += 1
                yield number, job


def _live(number: int, job: Job, now: float) -> dict[str, Any]:
    live = job.live
    return {
        "number": number,
        "tenant": job.tenant,
        "state": job.state,
        "branches": len(live) or job.params.num_sequences,
        "prompt_tokens": job.prompt_length,
        "cached_tokens": job.cached_tokens,
        "generated_tokens": sum(len(result.output.token_ids) for result in job.results),
        # currently held, summed over all layer groups
        "blocks": sum(branch.sequence.num_held for branch in live if branch.sequence is not None),
        "preemptions": job.preemptions,
        "seconds": now - job.timing.arrival_s,  # since arrival
        "ttft_s": job.timing.ttft_s,
    }


def _parts(layout: GroupLayout) -> list[dict[str, Any]]:
    """Return each format's share of the bytes of a group's blocks, including scales, largest first."""
    found: dict[str, tuple[set[str], set[int], int]] = {}
    for layer in layout.layers:
        k_bytes = layer.k_codes.nbytes + layer.k_scales.nbytes
        v_bytes = layer.v_codes.nbytes + layer.v_scales.nbytes
        for side, form, nbytes in (("K", layer.formats.k, k_bytes), ("V", layer.formats.v, v_bytes)):
            sides, layers, total = found.get(form.name, (set(), set(), 0))
            found[form.name] = (sides | {side}, layers | {layer.geometry.index}, total + nbytes)
    parts = [
        {
            "kv": name,
            "side": "K and V" if len(sides) == 2 else "K" if "K" in sides else "V",
            "layers": len(layers),
            "block_bytes": total,
        }
        for name, (sides, layers, total) in found.items()
    ]
    return sorted(parts, key=lambda part: -part["block_bytes"])


def _percentile(values: list[float], percent: int) -> float | None:
    """Return the nearest-rank percentile of sorted values."""
    return values[ceil(percent * len(values) / 100) - 1] if values else None
