"""Who wants to know what every step was like, and telling them."""

import logging
from collections.abc import Callable

from kvq.engine.launch import Launched
from kvq.engine.linear_time import LinearTime
from kvq.engine.stats import StepStats
from kvq.models import Model
from kvq.scheduler import Scheduler

_log = logging.getLogger("kvq")
StepSubscriber = Callable[[StepStats], object]


class Publisher:
    """Subscribers to the stats of one engine's steps; without any, nothing is measured."""

    def __init__(self, model: Model, scheduler: Scheduler) -> None:
        self._model = model
        self._scheduler = scheduler
        self._on_cpu = model.weights.device.type == "cpu"
        self._subscribers: list[StepSubscriber] = []
        self._linear: LinearTime | None = None
        self._is_closed = False

    @property
    def has_subscribers(self) -> bool:
        """True while anybody wants to know."""
        return bool(self._subscribers)

    def subscribe(self, subscriber: StepSubscriber) -> Callable[[], None]:
        """Call `subscriber` with the stats of every step from now on. Returns a function that ends it."""
        if self._is_closed:
            return lambda: None
        self._subscribers.append(subscriber)
        if self._linear is None and self._on_cpu:
            self._linear = LinearTime(self._model.weights.model)
        return lambda: self._drop(subscriber)

    def publish(self, running: Launched, *, seconds: float, sampling_s: float, finished: int) -> None:
        """Tell of a step that took so long. A subscriber that raises is reported and dropped."""
        stats = self._stats(running, seconds, sampling_s, finished)
        for subscriber in tuple(self._subscribers):
            try:
                subscriber(stats)
            except Exception:  # noqa: BLE001 - somebody else's code must not stop the steps
                _log.exception("a subscriber to step stats failed and is dropped")
                self._drop(subscriber)

    def close(self) -> None:
        """Measure nothing any more."""
        self._is_closed = True
        if self._linear is not None:
            self._linear.close()

    def _drop(self, subscriber: StepSubscriber) -> None:
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)
        if not self._subscribers and self._linear is not None:
            self._linear.close()
            self._linear = None

    def _stats(self, running: Launched, seconds: float, sampling_s: float, finished: int) -> StepStats:
        plan = running.plan
        return self._scheduler.snapshot().as_part_of(
            StepStats,
            number=plan.number,
            decode_tokens=plan.num_decodes,
            prefill_tokens=plan.num_tokens - plan.num_decodes,
            decode_context=sum(plan.ends[: plan.num_decodes]),
            prefill_context=plan.prefill_context,
            sampled=sum(plan.samples),
            finished=finished,
            utilization=self._scheduler.manager.utilization(),
            seconds=seconds,
            scheduling_s=running.scheduling_s,
            forward_s=running.forward_s,
            attention_s=running.output.attention_s if self._on_cpu else None,
            linear_s=None if self._linear is None else self._linear.take(),
            sampling_s=sampling_s,
        )
