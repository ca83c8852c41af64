"""Several models behind one address: their engines, and the application in front of them."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import prometheus_client
from fastapi import FastAPI

from kvq.errors import KVQError
from kvq.models.loading.tokenizer import load_without_torch
from kvq.server.admission.rate_limits import Tenant, TenantLimits
from kvq.server.app import GENERATING, READING, answer_problems, create_routes, empty_app, guard
from kvq.server.assembly import make_remote, make_service
from kvq.server.http.credentials import Credentials
from kvq.server.http.loop_budget import LoopBudget
from kvq.server.logs import log_event
from kvq.server.models import merged, overview
from kvq.server.models.config import HostedModel, ModelsConfig
from kvq.server.models.dispatcher import Dispatcher
from kvq.server.models.hosted import Hosted
from kvq.server.models.memory import plan_apart
from kvq.server.models.rollouts import Rollouts
from kvq.server.models.shadow import SHADOW, Shadows

_log = logging.getLogger("kvq")
_LOOK_S = 0.5  # between two looks for idle models
Load = Callable[[Callable[[], Any]], Awaitable[Any]]  # runs a function in a thread


class Fleet:
    """Models of one server. Made by `create`; their engines start with `start` or with a request."""

    def __init__(self, config: ModelsConfig, models: dict[str, Hosted], credentials: Credentials) -> None:
        self._config, self.models = config, models
        self._registry = prometheus_client.CollectorRegistry()
        self._rollouts = Rollouts(config, models, self._registry)
        self._shadows = Shadows(self._registry)
        self._tasks: list[asyncio.Task[None]] = []
        self.app = self._create_app(credentials)

    @classmethod
    async def create(cls, config: ModelsConfig, credentials: Credentials, load: Load) -> "Fleet":
        """Return the models with their tokenizers loaded, and no engine.

        Raises:
            KVQError: a model can't be found, or an option can't be used.
        """
        plans = await load(partial(plan_apart, config.models))
        budget, models = LoopBudget(), dict[str, Hosted]()
        tenants = defaultdict[str, Tenant](lambda: Tenant(config.server.tenants))
        tenants[SHADOW] = Tenant(TenantLimits())
        has_keys = bool(config.server.access.api_keys)
        for given, plan in zip(config.models, plans, strict=True):
            _log.info("memory: %s", plan)
            one = plan.applied(given)
            hosted = models[one.entry.name] = await _host(one, budget, load, has_keys)
            hosted.service.admission.tenants = tenants  # limits of a key are for all models together
            hosted.service.kv_format_of = credentials.kv_format
        return cls(config, models, credentials)

    @property
    def num_active(self) -> int:
        """Number of requests between their arrival and their answer."""
        return sum(one.service.num_active for one in self.models.values())

    def watch(self, name: str, what: str, read: Callable[[], float]) -> None:
        """Add a gauge of the HTTP process, whose value is read at every scrape."""
        prometheus_client.Gauge(name, what, registry=self._registry).set_function(read)

    async def start(self) -> None:
        """Start the engines that start with the server, and wait until they are ready.

        Raises:
            KVQError: one of them can't be started.
        """
        self._tasks = [asyncio.create_task(self._rollouts.watch()), asyncio.create_task(self._stop_idle())]
        await asyncio.gather(*(one.start() for one in self.models.values() if one.entry.start == "eager"))

    def announce(self, address: str) -> None:
        """Log what is served."""
        for name, one in self.models.items():
            state = one.service.remote.state.value
            log_event("model", served=name, source=str(one.source), state=state)
        _log.info("kvq serves %s on %s", ", ".join(self._dispatcher.names), address)

    async def drain(self, grace_s: float | None) -> None:
        """Stop accepting requests; return when all have ended, or after `grace_s`."""
        await asyncio.gather(*(one.service.drain(grace_s) for one in self.models.values()))

    def hurry(self) -> None:
        """Make `drain` return immediately."""
        for one in self.models.values():
            one.service.hurry()

    async def close(self) -> None:
        """End all engines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._shadows.close()
        await asyncio.gather(*(one.close() for one in self.models.values()))

    async def _stop_idle(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for one in self.models.values():
                await one.stop_if_idle()

    def _create_app(self, credentials: Credentials) -> FastAPI:
        app, first = empty_app(), next(iter(self.models.values())).service
        self._dispatcher = Dispatcher(self.models, self._rollouts, self._shadows, first.loop_budget)
        for part in (merged, overview):
            part.add_routes(app, self.models, self._rollouts, self._registry)
        app.openapi = next(iter(self.models.values())).app.openapi  # type: ignore[method-assign]
        app.router.default = self._dispatcher
        answer_problems(app, lambda path, problem: None)
        tenants = first.admission.tenants
        guard(
            app,
            self._config.server.access,
            credentials,
            check=partial(_check_rates, tenants),
            charge=lambda tenant: tenants[tenant].charge_request(),
        )
        return app


def _check_rates(tenants: dict[str, Tenant], path: str, tenant: str) -> None:
    if path in (*GENERATING, *READING):
        tenants[tenant].check_rates()


async def _host(given: HostedModel, budget: LoopBudget, load: Load, has_keys: bool) -> Hosted:
    """Return a model whose engine is not started."""
    config = given.config

    def fail(error: KVQError) -> None:
        hosted.note_failure(error)

    source, remote = make_remote(config, on_failed=fail)
    tokenizer = await load(partial(load_without_torch, source.folder, config.chat_template))
    service = make_service(config, given.entry.name, source.folder, remote, tokenizer)
    service.loop_budget = budget
    hosted = Hosted(given, source, service, create_routes(service, has_keys=has_keys))
    return hosted
