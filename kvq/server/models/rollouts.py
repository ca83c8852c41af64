"""Roll-outs of a running server: current weights, kept in step with the state file, and fall-backs."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import prometheus_client

from kvq.errors import ConfigError
from kvq.server.http.problems import unavailable
from kvq.server.logs import log_event
from kvq.server.models.config import ModelsConfig, Rollout
from kvq.server.models.health import Health
from kvq.server.models.hosted import Hosted
from kvq.server.models.state import StateFile
from kvq.server.models.versions import choose_version

_log = logging.getLogger("kvq")
_LOOK_S = 0.25  # between two looks at the state file and at the versions' health
_LABELS = ("name", "version")


@dataclass(slots=True, eq=False)
class LiveRollout:
    """Roll-out with its current weights."""

    name: str
    rollout: Rollout
    weights: dict[str, float] = field(default_factory=dict)

    def choose(self, key: bytes) -> str:
        """Return the version for a session; raise Problem (503) if no version has a weight."""
        if (version := choose_version(self.weights, key)) is None:
            words = f"every version of {self.name} has weight 0; see kvq rollout"
            raise unavailable(words, retry_after_s=30)
        return version


class Rollouts:
    """All roll-outs of a server."""

    def __init__(
        self,
        config: ModelsConfig,
        models: Mapping[str, Hosted],
        registry: prometheus_client.CollectorRegistry,
    ) -> None:
        """`models`: all models, by name. Raises ConfigError if the state file can't be read."""
        self.by_name = {name: LiveRollout(name, one) for name, one in config.rollouts.items()}
        self._models = models
        self._file = StateFile(config.path, config.rollouts)
        self._mark = self._file.mark()
        self._health = {name: Health() for name in models}
        self._weight = prometheus_client.Gauge(
            "kvq_rollout_weight", "Weight of a version.", _LABELS, registry=registry
        )
        self.requests = prometheus_client.Counter(
            "kvq_rollout_requests", "Requests that a version got by its weight.", _LABELS, registry=registry
        )
        self.fall_backs = prometheus_client.Counter(
            "kvq_rollout_fall_backs", "Times that a version lost its weight.", _LABELS, registry=registry
        )
        for name, hosted in models.items():
            hosted.service.metrics.on_ending = self._health[name].ended
            hosted.service.metrics.on_ttft = self._health[name].began
        self._apply()
        for name, live in self.by_name.items():
            for version in live.rollout.weights:
                for counter in (self.requests, self.fall_backs):
                    counter.labels(name, version)

    async def watch(self) -> None:
        """Follow the state file and judge the versions' health, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            mark = await asyncio.to_thread(self._file.mark)
            if mark != self._mark:
                self._mark = mark
                try:
                    self._apply()
                except ConfigError as error:
                    _log.error("roll-outs stay as they were: %s", error)
            for live in self.by_name.values():
                await self._judge(live)

    def _apply(self) -> None:
        """Take the weights and stopped versions from the state file."""
        state = self._file.read()
        for name, hosted in self._models.items():
            hosted.is_stopped = name in state.stopped
        for live in self.by_name.values():
            self._set(live, state.of(live.name, live.rollout))

    def _set(self, live: LiveRollout, weights: dict[str, float]) -> None:
        name = live.name
        for version, weight in weights.items():
            self._weight.labels(name, version).set(weight)
            if weight and not live.weights.get(version):
                self._health[version].forget()
        if live.weights and weights != live.weights:
            log_event("rollout", rollout=name, weights=" ".join(f"{k}={v:g}" for k, v in weights.items()))
        live.weights = weights

    async def _judge(self, live: LiveRollout) -> None:
        """Give a version's requests to the others if it is past a limit, and there are others."""
        limits, name = live.rollout.fall_back, live.name
        weighted = [version for version, weight in live.weights.items() if weight]
        if limits is None or len(weighted) < 2:
            return
        for version in weighted:
            health = self._health[version]
            health.guarded(self._models[version].service.metrics.total("guard_alerts"))
            reason = health.why_unfit(limits, [self._health[one] for one in weighted if one != version])
            if reason is None:
                continue
            log_event("fall back", level=logging.WARNING, rollout=name, version=version, reason=reason)
            self.fall_backs.labels(name, version).inc()
            self._set(live, live.weights | {version: 0.0})
            try:
                await asyncio.to_thread(self._file.set_weights, name, {version: 0.0}, "server", reason)
            except ConfigError as error:
                _log.error("the fall-back is not recorded: %s", error)
            return  # the others are judged by what they do from now on
