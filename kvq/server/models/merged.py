"""Routes about all models of a server: what it serves, whether it is healthy, and its metrics."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import prometheus_client
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from starlette.types import Scope

from kvq.server.admission.metrics import CONTENT_TYPE
from kvq.server.http.problems import Problem, unavailable
from kvq.server.models.hosted import Hosted
from kvq.server.models.inner import ask
from kvq.server.models.rollouts import Rollouts

_LISTS = {"/v1/models": "data", "/api/tags": "models", "/api/ps": "models"}  # keys of their lists


def add_routes(
    app: FastAPI,
    models: Mapping[str, Hosted],
    rollouts: Rollouts,
    registry: prometheus_client.CollectorRegistry,
) -> None:
    """Add the routes. `registry`: metrics of the whole process."""

    async def listed(request: Request) -> JSONResponse:
        path = request.url.path
        entries = await _listed(request.scope, path, models, rollouts)
        return JSONResponse({"object": "list", _LISTS[path]: entries})

    for path in _LISTS:
        app.add_api_route(path, listed, methods=["GET"])

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> JSONResponse:
        entries = await _listed(request.scope, "/v1/models", models, rollouts)
        if (found := next((one for one in entries if one["id"] == name), None)) is None:
            known = ", ".join(repr(one["id"]) for one in entries)
            words = f"no model {name!r:.99} here; this server has {known}"
            raise Problem(404, words, code="model_not_found", param="model")
        return JSONResponse(found)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = prometheus_client.generate_latest(_Merged(models, registry))
        return Response(text, media_type=CONTENT_TYPE)

    @app.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/health")
    @app.get("/health/ready")
    async def ready() -> dict[str, Any]:
        reasons = {name: one.why_unavailable for name, one in models.items()}
        eager = {name: one.service.remote for name, one in models.items() if one.entry.start == "eager"}
        if first := [name for name, remote in eager.items() if not remote.num_starts]:
            raise unavailable(f"{', '.join(first)}: starting")
        if all(reasons.values()):
            raise unavailable("; ".join(f"{name}: {why}" for name, why in reasons.items()))
        states = {name: why or models[name].service.remote.state.value for name, why in reasons.items()}
        return {"status": "ready", "models": states}

    @app.get("/health/deep")
    async def generates(request: Request) -> dict[str, Any]:
        """Ask every model that has an engine, one after another."""
        found: dict[str, Any] = {}
        for name, one in models.items():
            if one.has_engine:
                status, body = await ask(one.app, request.scope, {})
                found[name] = json.loads(body)
                if status != 200:
                    raise unavailable(f"{name}: {found[name]['error']['message']}")
        return {"status": "generating", "models": found}


async def _listed(
    scope: Scope, path: str, models: Mapping[str, Hosted], rollouts: Rollouts
) -> list[dict[str, Any]]:
    """Return the entries of all models, and for every roll-out a copy of its first version's."""
    key, by_model = _LISTS[path], dict[str, list[dict[str, Any]]]()
    for name, one in models.items():
        _, body = await ask(one.app, scope, {"path": path})
        by_model[name] = json.loads(body)[key]
    names = {name: next(iter(live.rollout.weights)) for name, live in rollouts.by_name.items()}
    called = ("id",) if key == "data" else ("name", "model")
    copies = [by_model[first][0] | dict.fromkeys(called, name) for name, first in names.items()]
    return copies + [entry for entries in by_model.values() for entry in entries]


class _Merged:
    """Metrics of all models, each sample with the label `model`, and those of the process."""

    def __init__(self, models: Mapping[str, Hosted], own: prometheus_client.CollectorRegistry) -> None:
        self._models, self._own = models, own

    def collect(self) -> Iterator[Metric]:
        """Yield every family once."""
        merged: dict[str, Metric] = {}
        for name, one in self._models.items():
            for family in one.service.metrics.families():
                whole = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += _labelled(family.samples, name)
        yield from merged.values()
        yield from self._own.collect()


def _labelled(samples: Iterable[Sample], model: str) -> Iterator[Sample]:
    for sample in samples:
        yield sample._replace(labels={"model": model, **sample.labels})
