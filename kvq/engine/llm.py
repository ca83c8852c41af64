"""`kvq.LLM`: prompts in, results out, as many at a time as the pool holds."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

from kvq.engine.build import build
from kvq.engine.core import EngineCore
from kvq.engine.intake import Origin
from kvq.engine.job import Job
from kvq.engine.loop import EngineLoop
from kvq.engine.outputs import Event, Piece, RequestOutput, as_piece
from kvq.engine.params import Params, as_params, each_params
from kvq.engine.prompts import Prompt, as_prompts
from kvq.engine.publisher import StepSubscriber
from kvq.formats import KVRecipe
from kvq.models import Model
from kvq.models.resolve import ModelSource
from kvq.models.stays_here import StaysHere
from kvq.scheduler import Priority


class LLM(StaysHere):
    """An engine that runs in the caller's thread.

        llm = kvq.LLM("tiny", kv="int4", kv_memory="1GiB")
        for output in llm.generate(["Once upon"], kvq.SamplingParams(max_tokens=64)):
            print(output.outputs[0].text, output.receipt)

    Requests are batched continuously: each step computes the next token of everybody who runs, and a
    part of the prompts of those who start.
    """

    def __init__(
        self,
        model: str | Path | ModelSource | Model,
        kv: str | KVRecipe = "auto",
        *,
        on_stuck: Callable[[float], object] | None = None,
        **options: Any,
    ) -> None:
        """`model`: a folder, a name, or what `kvq.load` returned. Options are those of `EngineConfig`
        and, unless the model is loaded already, of `kvq.load`.

        Raises:
            ModelError: missing, damaged or refused model.
            ConfigError: an unknown option, or one out of range.
            OutOfMemory: the pools don't fit.
        """
        loaded, config = build(model, kv, options)
        self.core = EngineCore(loaded, config)
        self._loop = EngineLoop(self.core, on_stuck)
        weakref.finalize(self, self._loop.watchdog.stop)  # for those who forget to close

    @property
    def model(self) -> Model:
        """The model that runs."""
        return self.core.model

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        priority: str | Priority = Priority.BATCH,
        tenant: str = "",
        cache_salt: str | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> list[RequestOutput]:
        """Results of all prompts, in their order. `params`: one for all, or one each. `cache_salt`: cached
        prefixes are shared only with requests of the tenant that name the same.

        All requests are checked before any is run. One that fails while it runs has an `error`; the
        others go on. `progress` is called with (ended, total).

        Raises:
            RequestError: a prompt or parameters that can't be served; nothing was run.
        """
        many = as_prompts(prompts)
        each = each_params(params, len(many))
        origin = Origin(priority=priority, tenant=tenant, cache_salt=cache_salt)
        outputs: list[RequestOutput | None] = [None] * len(many)
        jobs = [
            self.core.intake.new_job(prompt, chosen, origin, listener=_Keeper(outputs, i, progress))
            for i, (prompt, chosen) in enumerate(zip(many, each, strict=True))
        ]
        self._run(jobs)
        return [cast(RequestOutput, output) for output in outputs]

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        tenant: str = "",
        cache_salt: str | None = None,
    ) -> Iterator[Piece]:
        """Pieces of one prompt's results as they come; the request is checked at once.

        Leaving the loop early cancels the request.

        Raises:
            RequestError: the request can't be served, or failed while it ran.
        """
        events: list[Event] = []
        origin = Origin(tenant=tenant, cache_salt=cache_salt)
        job = self.core.intake.new_job(prompt, as_params(params), origin, listener=events.append)
        return self._stream(job, events)

    def on_step(self, subscriber: StepSubscriber) -> Callable[[], None]:
        """Call `subscriber` with `StepStats` after every step. Returns a function that ends it."""
        return self.core.on_step(subscriber)

    def step(self) -> None:
        """Run one step, for those who drive the engine themselves."""
        self._loop.step()

    def close(self) -> None:
        """End what runs and give back the memory."""
        self.core.close()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, jobs: list[Job]) -> None:
        """Submit jobs and step until all have ended; an interruption cancels them."""
        try:
            for job in jobs:
                while not self.core.can_submit(job):
                    self.step()
                self.core.submit(job)
            while self.core.has_work:
                self.step()
        except BaseException:
            for job in jobs:
                self.core.cancel(job)
            raise

    def _stream(self, job: Job, events: list[Event]) -> Iterator[Piece]:
        self.core.submit(job)
        try:
            while True:
                for piece in map(as_piece, events):
                    yield piece
                    if piece.output is not None:
                        return
                events.clear()
                self.step()
        finally:
            self.core.cancel(job)


class _Keeper:
    """Keeps a request's output at its place."""

    def __init__(
        self,
        outputs: list[RequestOutput | None],
        index: int,
        progress: Callable[[int, int], object] | None,
    ) -> None:
        self._outputs = outputs
        self._index = index
        self._progress = progress

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestOutput):
            self._outputs[self._index] = event
            if self._progress is not None:
                done = sum(output is not None for output in self._outputs)
                self._progress(done, len(self._outputs))
