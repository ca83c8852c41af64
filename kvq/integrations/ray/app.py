"""Ray Serve application: an ingress, and replicas of `kvq serve` without a listener behind it."""

import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvq.errors import ConfigError, KVQError, nearest
from kvq.extras import RAY, SERVER, require
from kvq.integrations.ray.fleet import ROUTERS, Fleet
from kvq.server.admission.config import ServerConfig
from kvq.sizing.pools import MAX_NUM_SEQS

require("kvq.integrations.ray", (*RAY, *SERVER))

from ray import serve  # noqa: E402 - missing packages were reported above
from ray.exceptions import RayActorError, RayTaskError  # noqa: E402
from ray.serve.config import AutoscalingConfig, RequestRouterConfig  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import Response  # noqa: E402
from starlette.types import Message  # noqa: E402

from kvq.integrations.ray.relay import Lost, RelayedRequest, forward, read, relay  # noqa: E402
from kvq.models.loading.tokenizer import load_without_torch  # noqa: E402
from kvq.server.app import create_app  # noqa: E402
from kvq.server.assembly import make_remote, make_service  # noqa: E402
from kvq.server.health import check_readiness  # noqa: E402
from kvq.server.http.guard import as_response  # noqa: E402
from kvq.server.http.problems import Problem  # noqa: E402
from kvq.server.logs import configure, log_event  # noqa: E402

_FLEET = {field.name for field in fields(Fleet)}
_LISTENERS = {"host", "port", "tls", "max_connections", "max_connections_per_address"}  # set in Ray's proxy
_SERVER = {field.name for field in fields(ServerConfig)} - {"model", "kv", *_LISTENERS}
_WAIT_S = 0.5  # between two checks for whether the last request has ended
_LATE_S = 5.0  # time to send error objects after `grace_s`
_MANY = 100_000  # concurrent requests of an ingress; the replicas set the real limit
_END_S = 0.5  # time to respond to the requests of an engine that ended
_ENDED = "the replica ended; send the request again"


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
    engines = serve.deployment(_EngineReplica).options(name="kvq-engine", **_options(fleet, config))
    ingress = serve.deployment(_Ingress).options(
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


class _EngineReplica:  # D347: the HTTP process without its listener
    """Replica that Ray starts, monitors and ends. The engine is a separate process that ends with it."""

    async def __init__(self, config: ServerConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        """Start the engine and wait until it is ready.

        Raises:
            KVQError: the engine can't be started.
        """
        configure(config.log)
        is_ready = False

        def give_up(reason: KVQError) -> None:
            log_event("no engine", reason=str(reason))
            if is_ready:  # Ray then stops sending requests here, and starts another replica
                asyncio.get_running_loop().call_later(_END_S, partial(os._exit, 1))

        source, self._remote = make_remote(config, on_failed=give_up)
        tokenizer = await asyncio.to_thread(load_without_torch, source.folder, config.chat_template)
        self._service = make_service(config, source.name, source.folder, self._remote, tokenizer)
        try:
            await asyncio.gather(self._remote.start(), self._service.prompts.start())
        except BaseException:
            await self._service.close()
            raise
        is_ready = True
        self._app = create_app(self._service, config.access)

    async def answer(self, relayed: RelayedRequest) -> AsyncGenerator[Message]:
        """Yield the response messages that the application sends for a request.

        Raises:
            Lost: this replica can't accept requests, or the engine ended before the response started.
        """
        messages = relay(self._app, relayed)
        async for message in messages:
            reason = self._service.why_not_ready
            if reason is not None and message.get("status") == 503:
                await messages.aclose()
                raise Lost(reason)
            yield message

    async def check_health(self) -> None:  # D348: a replica ends with its engine
        """Raise RuntimeError if `/health/ready` would report an error."""
        try:
            await check_readiness(self._service)
        except Problem as problem:
            raise RuntimeError(problem.message) from None


class _Ingress:
    """Process that forwards requests from Ray's proxy to the replicas, through their router.

    It reads request bodies, because routers need the prompts, but does not validate them.
    """

    def __init__(self, engines: Any) -> None:
        """`engines`: handle of the deployment of replicas."""
        self._engines = engines.options(stream=True, method_name="answer")

    async def __call__(self, request: Request) -> Response:
        """Forward a request from Ray's proxy, and return the response."""
        try:
            relayed = await read(request)
        except Problem as problem:
            return as_response(problem, request.url.path)
        return await forward(relayed, self._send)

    async def _send(self, relayed: RelayedRequest) -> AsyncGenerator[Message]:
        """Yield the messages of the replica chosen by the router: by prompt or, without a prompt, by load.

        Raises:
            Lost: the chosen replica has ended or is about to end.
        """
        answer = self._engines.remote(relayed) if relayed.prompt else self._engines.remote(relayed=relayed)
        is_whole = False
        try:
            async for message in answer:
                yield message
            is_whole = True
        except RayActorError as error:
            raise Lost(_ENDED) from error
        except RayTaskError as error:
            if isinstance(error.cause, Lost):
                raise Lost(str(error.cause)) from None
            raise
        finally:
            if not is_whole:
                answer.cancel()


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
