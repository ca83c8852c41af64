"""Overview of all models, versions and adapters for the page at `/`."""

import json
from collections.abc import Mapping
from typing import Any

import prometheus_client
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from kvq.server.http.guard import POLLED
from kvq.server.models.hosted import Hosted
from kvq.server.models.inner import ask
from kvq.server.models.rollouts import LiveRollout, Rollouts
from kvq.server.viewers import HEADERS


def add_routes(
    app: FastAPI,
    models: Mapping[str, Hosted],
    rollouts: Rollouts,
    registry: prometheus_client.CollectorRegistry,
) -> None:
    """Add the page's data: those of the model that its query names, else the first, and the overview."""

    @app.get(POLLED)
    async def pool(request: Request, model: str = "") -> JSONResponse:
        shown = models.get(model) or next(iter(models.values()))
        _, found = await ask(shown.app, request.scope, {})
        _, entries = await ask(shown.app, request.scope, {"path": "/v1/models"})
        overview = {
            "models": [_of_model(name, one) for name, one in models.items()],
            "adapters": [one["id"] for one in json.loads(entries)["data"] if one.get("parent")],
            "rollouts": [_of_rollout(one, registry) for one in rollouts.by_name.values()],
        }
        return JSONResponse(json.loads(found) | overview, headers=HEADERS | {"Cache-Control": "no-store"})


def _of_model(name: str, hosted: Hosted) -> dict[str, Any]:
    gauges = hosted.service.remote.gauges
    return {
        "name": name,
        "state": hosted.why_unavailable or hosted.service.remote.state.value,
        "requests": hosted.num_requests,
        "tokens": hosted.service.metrics.total("generated_tokens"),
        "bytes": None if gauges is None else sum(gauges.memory.values()),
    }


def _of_rollout(live: LiveRollout, registry: prometheus_client.CollectorRegistry) -> dict[str, Any]:
    name, shadow = live.name, live.rollout.shadow

    def value(metric: str, version: str, **labels: str) -> float:
        return registry.get_sample_value(metric, {"name": name, "version": version, **labels}) or 0.0

    versions = [
        {"name": one, "weight": weight, "requests": value("kvq_rollout_requests_total", one)}
        for one, weight in live.weights.items()
    ]
    compared: dict[str, Any] | None = None
    if shadow is not None:
        equal, different = (
            value("kvq_shadow_requests_total", shadow.model, end=end) for end in ("equal", "different")
        )
        same, kl = (
            value(f"{metric}_sum", shadow.model) / (value(f"{metric}_count", shadow.model) or 1)
            for metric in ("kvq_shadow_same_tokens", "kvq_shadow_kl_nats")
        )
        compared = {"version": shadow.model, "equal": equal, "different": different, "same": same, "kl": kl}
    return {"name": name, "versions": versions, "shadow": compared}
