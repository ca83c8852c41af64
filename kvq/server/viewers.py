"""Web page at `/`, whose viewers share one snapshot of the engine."""

import asyncio
from collections.abc import Callable
from importlib.resources import files
from time import monotonic
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from kvq.errors import EngineError
from kvq.server.admission.service import Service
from kvq.server.engine.messages import EngineSnapshot
from kvq.server.http.guard import DOCS
from kvq.server.http.problems import Problem
from kvq.server.openai.respond import tenant_of
from kvq.version import __version__

_INTERVAL_S = 0.25  # minimum time between snapshots
_SHARE = 0.02  # maximum share of the engine's time for snapshots
_WAIT_S = 2.0  # maximum wait for a step to end; afterwards, the last snapshot is shown
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_CONTENT: dict[str, Any] = {kind: {"schema": {"type": "string"}} for kind in _TYPES.values()}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _Viewers:  # D333: snapshots are pulled: no viewer, no work
    """Snapshots for all viewers, taken only while there are viewers, and only as often as `_SHARE` allows."""

    def __init__(self, service: Service, clock: Callable[[], float] = monotonic) -> None:
        self._service = service
        self._clock = clock
        self._lock = asyncio.Lock()
        self._snapshot: EngineSnapshot | None = None
        self._pools: list[dict[str, Any]] = []  # pools of the snapshot, as JSON objects
        self._taken_s = 0.0

    @property
    def interval_s(self) -> float:
        """Seconds between two snapshots; longer if snapshots take longer."""
        cost_s = 0.0 if self._snapshot is None else self._snapshot.cost_s
        return max(_INTERVAL_S, cost_s / _SHARE)

    async def show(self, tenant: str, *, has_keys: bool) -> dict[str, Any]:
        """Return the data that a tenant may see: its own requests, and blocks and counts of all tenants."""
        async with self._lock:
            if self._clock() - self._taken_s >= self.interval_s:
                await self._look()
        service, snapshot = self._service, self._snapshot
        return {
            "model": service.name,
            "version": __version__,
            "kv": None if snapshot is None else snapshot.kv,
            "state": service.remote.state.value,
            "problem": service.why_not_ready,
            "restarts": service.remote.num_restarts,
            "needs_key": has_keys,
            "you": _name(tenant),
            "interval_s": self.interval_s,
            "totals": msgspec.to_builtins(service.remote.gauges),
            "guard_alerts": service.metrics.total("guard_alerts"),  # also of engines that ended
            "picture": None if snapshot is None else self._of(snapshot, tenant),
        }

    async def _look(self) -> None:
        remote = self._service.remote
        try:
            snapshot = await asyncio.wait_for(remote.look(), _WAIT_S)
        except TimeoutError:
            pass  # the last snapshot is shown
        except EngineError:
            self._snapshot = None
        else:
            self._snapshot = snapshot
            self._pools = msgspec.to_builtins(snapshot.pools)  # cells become base64
        self._taken_s = self._clock()

    def _guard(self, found: dict[str, Any], tenant: str) -> dict[str, Any]:
        """Return what the guard found, of tenants only what `tenant` may see."""
        own = {_name(name): kl for name, kl in found["kl_by_tenant"].items() if name == tenant}
        return found | {"kl_by_tenant": own}

    def _of(self, snapshot: EngineSnapshot, tenant: str) -> dict[str, Any]:
        tenants = [
            one | {"name": _name(one["name"])} | ({} if one["name"] == tenant else {"latency": None})
            for one in snapshot.tenants
        ]
        return {
            "block_size": snapshot.block_size,
            "guard": None if snapshot.guard is None else self._guard(snapshot.guard, tenant),
            "pools": self._pools,
            "tenants": tenants,
            "live": _own(snapshot.live, tenant),
            "past": _own(snapshot.past, tenant),
        }


def add_routes(app: FastAPI, service: Service, *, has_keys: bool) -> None:
    """Add the routes for the page, its files and its data."""
    viewers = _Viewers(service)
    assets = {
        file.name: (file.read_bytes(), _TYPES[kind])
        for file in (files("kvq.server") / "page").iterdir()
        if (kind := file.name.rpartition(".")[2]) in _TYPES
    }

    @app.get("/", response_class=HTMLResponse)
    async def page() -> Response:
        return await asset("index.html")

    @app.get(DOCS, response_class=HTMLResponse)
    async def docs() -> Response:
        return await asset("docs.html")

    @app.get("/page/{name}", response_class=Response, responses={200: {"content": _CONTENT}})
    async def asset(name: str) -> Response:
        if name not in assets:
            raise Problem(404, f"no file {name!r} here")
        content, media_type = assets[name]
        return Response(content, media_type=media_type, headers=HEADERS)

    @app.get("/pool", responses={200: {"model": dict[str, Any]}})
    async def pool(request: Request) -> Response:
        shown = await viewers.show(tenant_of(request), has_keys=has_keys)
        return JSONResponse(shown, headers=HEADERS | {"Cache-Control": "no-store"})


def _own(requests: list[dict[str, Any]], tenant: str) -> list[dict[str, Any]]:
    """Return the requests of a tenant, without the tenant's name."""
    found = (one for one in requests if one["tenant"] == tenant)
    return [{name: value for name, value in one.items() if name != "tenant"} for one in found]


def _name(tenant: str) -> str:
    """Return a tenant's name on the page: the number of its key, counted from 1, never the key itself."""
    kind, _, number = tenant.partition("-")
    return f"{kind} {int(number) + 1}" if kind == "key" and number.isdigit() else tenant
