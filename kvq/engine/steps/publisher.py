"""Step statistics, and the subscribers that receive them after every step."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import nn

from kvq.engine.steps.flight import Flight
from kvq.models import Model
from kvq.scheduler import Scheduler, Snapshot
from kvq.weights import PackedLinear
from kvq.weights.install import GatedMLP


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats(Snapshot):
    """Statistics of one step. Times are in seconds; unless stated otherwise, counts are as of its end.

    On a GPU, `attention_s` and `linear_s` are None, since kernels run asynchronously.
    """

    number: int
    decode_tokens: int
    draft_tokens: int  # drafts that the step verifies
    prefill_tokens: int
    decode_context: int  # tokens that the decodes attend to, ignoring windows
    prefill_context: int  # pairs of a prefill token and a token that it attends to, ignoring windows
    sampled: int  # sequences that sample a token
    finished: int  # in this step
    utilization: float | None  # filled slots / slots of live blocks, if measured
    seconds: float  # the entire step
    scheduling_s: float
    forward_s: float
    drafting_s: float  # part of forward_s
    attention_s: float | None  # part of forward_s: writing to blocks and attending over them
    linear_s: float | None  # part of forward_s: Linear layers; None before the first subscriber
    sampling_s: float


_log = logging.getLogger("kvq")
StepSubscriber = Callable[[StepStats], object]


class _LinearTime:
    """Time spent in all Linear layers of a model on a CPU."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds = 0.0
        self._began = 0.0
        self._hooks = []
        fused = {
            child for module in model.modules() if isinstance(module, GatedMLP) for child in module.children()
        }
        for module in model.modules():
            if isinstance(module, nn.Linear | PackedLinear | GatedMLP) and module not in fused:
                self._hooks.append(module.register_forward_pre_hook(self._begin))
                self._hooks.append(module.register_forward_hook(self._end))

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def close(self) -> None:
        """Stop measuring."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, *_: Any) -> None:
        self._began = perf_counter()

    def _end(self, *_: Any) -> None:
        self.seconds += perf_counter() - self._began


class Publisher:
    """Publisher of step statistics to subscribers. Without subscribers, nothing is measured."""

    def __init__(self, model: Model, scheduler: Scheduler) -> None:
        self._model = model
        self._scheduler = scheduler
        self._on_cpu = model.weights.device.type == "cpu"
        self._subscribers: list[StepSubscriber] = []
        self._linear: _LinearTime | None = None
        self._is_closed = False

    def subscribe(self, subscriber: StepSubscriber) -> Callable[[], None]:
        """Call `subscriber` with the stats of every step from now on; return a function that unsubscribes."""
        if self._is_closed:
            return lambda: None
        self._subscribers.append(subscriber)
        if self._linear is None and self._on_cpu:
            self._linear = _LinearTime(self._model.weights.model)
        return lambda: self._drop(subscriber)

    def publish(self, flight: Flight, *, finished: int) -> None:
        """Send a step's statistics. A subscriber that raises an error is logged and removed."""
        if not self._subscribers:
            return
        stats = self._stats(flight, finished)
        for subscriber in tuple(self._subscribers):
            try:
                subscriber(stats)
            except Exception:  # noqa: BLE001 - a subscriber must not stop the steps
                _log.exception("a subscriber to step stats failed and is dropped")
                self._drop(subscriber)

    def close(self) -> None:
        """Stop measuring."""
        self._is_closed = True
        if self._linear is not None:
            self._linear.close()

    def _drop(self, subscriber: StepSubscriber) -> None:
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)
        if not self._subscribers and self._linear is not None:
            self._linear.close()
            self._linear = None

    def _stats(self, flight: Flight, finished: int) -> StepStats:
        plan, watch = flight.plan, flight.watch
        return StepStats(
            **self._scheduler.snapshot().known(),
            number=plan.number,
            decode_tokens=plan.num_decodes,
            draft_tokens=plan.num_drafts,
            prefill_tokens=plan.prefill_tokens,
            decode_context=sum(plan.ends[: plan.num_decodes]),
            prefill_context=plan.prefill_context,
            sampled=sum(plan.samples),
            finished=finished,
            utilization=self._scheduler.manager.utilization(),
            seconds=watch.seconds,
            scheduling_s=watch["scheduling"],
            forward_s=watch["forward"] + watch["drafting"],
            drafting_s=watch["drafting"],
            attention_s=flight.result().attention_s if self._on_cpu else None,
            linear_s=None if self._linear is None else self._linear.take(),
            sampling_s=watch["sampling"],
        )
