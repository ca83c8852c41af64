"""Ray Serve application: an ingress and its replicas."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvq.errors import ConfigError, nearest
from kvq.extras import RAY, SERVER, require
from kvq.integrations.ray.fleet import ROUTERS, Fleet
from kvq.server.admission.config import ServerConfig
from kvq.sizing.pools import MAX_NUM_SEQS

require("kvq.integrations.ray", (*RAY, *SERVER))

from ray import serve  # noqa: E402 - missing packages were reported above
from ray.serve.config import AutoscalingConfig, RequestRouterConfig  # noqa: E402

from kvq.integrations.ray.actors import EngineReplica, Ingress  # noqa: E402

_FLEET = {field.name for field in fields(Fleet)}
_LISTENERS = {"host", "port", "tls", "max_connections", "max_connections_per_address"}  # set in Ray's proxy
_SERVER = {field.name for field in fields(ServerConfig)} - {"model", "kv", *_LISTENERS}
_WAIT_S = 0.5  # between two checks for whether the last request has ended
_LATE_S = 5.0  # time to send error objects after `grace_s`
_MANY = 100_000  # concurrent requests of an ingress; the replicas set the real limit


def application(model: str | Path = "tiny", kv: str = "auto", **options: Any) -> serve.Application:
    """Return an application for `serve.run`: replicas of `kvq serve` behind one of Ray's routers.

    `options`: options of `Fleet` (num_replicas, max_replicas, router, ray_actor_options, ...) and of
    `ServerConfig` (served_model_name, access, admission, grace_s, `engine` with options of `kvq.LLM`, ...).
    If an engine ends, its replica also ends, unless `max_restarts` allows a restart. Ray then starts another
    replica, and the requests are sent to other replicas. `model`: a folder on every node, or a name on a hub.

    Raises:
        ConfigError: an option is unknown or can't be used.
    """
    if unknown := sorted(options.keys() - _FLEET - _SERVER):
        hint = nearest(unknown[0], sorted(_FLEET | _SERVER))
        raise ConfigError(f"kvq.integrations.ray has no option {unknown[0]!r}{hint}")
    fleet = Fleet(**{name: value for name, value in options.items() if name in _FLEET})
    served = {name: value for name, value in options.items() if name in _SERVER}
    config = ServerConfig(model=model, kv=kv, **{"max_restarts": 0, **served})
    engines = serve.deployment(EngineReplica).options(name="kvq-engine", **_options(fleet, config))
    ingress = serve.deployment(Ingress).options(
        name="kvq",
        num_replicas=fleet.num_ingresses,
        max_ongoing_requests=_MANY,
        graceful_shutdown_timeout_s=config.grace_s + 2 * _LATE_S,  # the requests of replicas end earlier
        graceful_shutdown_wait_loop_s=_WAIT_S,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(engines.bind(config))


def _options(fleet: Fleet, config: ServerConfig) -> dict[str, Any]:
    """Return Ray's options for the replicas."""
    seats = int(config.engine.get("max_num_seqs", MAX_NUM_SEQS))
    options: dict[str, Any] = {
        "max_ongoing_requests": seats + config.admission.max_queue,  # the ingress queues further requests
        "graceful_shutdown_timeout_s": config.grace_s + _LATE_S,
        "graceful_shutdown_wait_loop_s": _WAIT_S,
        "ray_actor_options": dict(fleet.ray_actor_options),
        "request_router_config": RequestRouterConfig(
            request_router_class=ROUTERS[fleet.router], request_router_kwargs=fleet.router_kwargs
        ),
    }
    if fleet.max_replicas is None:
        return options | {"num_replicas": fleet.num_replicas}
    scaling = {"target_ongoing_requests": seats, **fleet.autoscaling}  # with more requests, some wait
    bounds = {"min_replicas": fleet.num_replicas, "max_replicas": fleet.max_replicas}
    return options | {"autoscaling_config": AutoscalingConfig(**scaling, **bounds)}


class _Arguments(BaseModel):
    """Arguments of `serve run kvq.integrations.ray:build`, and of a file for `serve deploy`."""

    model_config = ConfigDict(extra="forbid", title="Arguments")
    model: str = "tiny"
    kv: str = "auto"
    served_model_name: str | None = None
    num_replicas: int = 1
    max_replicas: int | None = None
    autoscaling: dict[str, Any] = Field(default_factory=dict)
    router: str = "affinity"
    router_options: dict[str, Any] = Field(default_factory=dict)
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)
    engine: dict[str, Any] = Field(default_factory=dict)


def build(args: _Arguments) -> serve.Application:
    """Return the application that the arguments of Ray's command line or configuration file describe."""
    return application(**args.model_dump())
