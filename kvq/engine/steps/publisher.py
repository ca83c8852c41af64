"""What every step was like, who wants to know it, and telling them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import nn

from kvq.engine.steps.launch import Launched
from kvq.models import Model
from kvq.scheduler import Scheduler, Snapshot
from kvq.weights import PackedLinear
from kvq.weights.install import GatedMLP


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats(Snapshot):
    """One step. Times in seconds; counts of requests and tokens at its end unless said otherwise.

    On a GPU `attention_s` and `linear_s` are None: kernels run while the host goes on.
    """

    number: int
    decode_tokens: int
    draft_tokens: int  # guessed, and checked by the step
    prefill_tokens: int
    decode_context: int  # tokens that the decodes see together, windows aside
    prefill_context: int  # pairs of a prefill token and one that it sees, likewise
    sampled: int  # sequences that get a token
    finished: int  # in this step
    utilization: float | None  # filled slots of live blocks; None unless it is asked for
    seconds: float  # the whole step
    scheduling_s: float
    forward_s: float
    drafting_s: float  # of the forward pass's time
    attention_s: float | None  # of the forward pass: writing to blocks and attending from them
    linear_s: float | None  # of the forward pass: Linear layers; None unless somebody subscribed
    sampling_s: float


_log = logging.getLogger("kvq")
StepSubscriber = Callable[[StepStats], object]


class LinearTime:
    """Adds up the time in all Linear layers of a model on a CPU."""

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
        """The seconds since the last call."""
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
    """Subscribers to the stats of one engine's steps; without any, nothing is measured."""

    def __init__(self, model: Model, scheduler: Scheduler) -> None:
        self._model = model
        self._scheduler = scheduler
        self._on_cpu = model.weights.device.type == "cpu"
        self._subscribers: list[StepSubscriber] = []
        self._linear: LinearTime | None = None
        self._is_closed = False

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
        if not self._subscribers:
            return
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
            seconds=seconds,
            scheduling_s=running.scheduling_s,
            forward_s=running.forward_s,
            drafting_s=running.drafting_s,
            attention_s=running.output.attention_s if self._on_cpu else None,
            linear_s=None if self._linear is None else self._linear.take(),
            sampling_s=sampling_s,
        )
