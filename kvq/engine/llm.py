"""`kvq.LLM`: prompts in, results out, as many at a time as the pool holds."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from time import sleep
from typing import Any, Self, cast

from kvq.engine.build import build
from kvq.engine.core import EngineCore, StepSubscriber, check_items
from kvq.engine.here import StaysHere
from kvq.engine.job import Job
from kvq.engine.outputs import Piece, RequestOutput
from kvq.engine.params import SamplingParams, sampling_params
from kvq.engine.watchdog import Watchdog
from kvq.errors import RequestError
from kvq.formats import KVRecipe
from kvq.models import Model
from kvq.models.resolve import ModelSource
from kvq.scheduler import Priority

Prompt = str | Sequence[int]  # text, or token ids
Params = SamplingParams | Mapping[str, Any]  # or its fields
_GRAMMAR_POLL_S = 0.002


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
        self._watchdog = Watchdog(config.step_deadline_s, on_stuck)
        weakref.finalize(self, self._watchdog.stop)  # for those who forget to close

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
        many = _as_prompts(prompts)
        each = _as_params(params, len(many))
        outputs: list[RequestOutput | None] = [None] * len(many)
        jobs = [
            self.core.new_job(
                prompt,
                chosen,
                priority=as_priority(priority),
                tenant=tenant,
                cache_salt=cache_salt,
                listener=_Keeper(outputs, i, progress),
            )
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
        pieces: list[Piece] = []
        job = self.core.new_job(
            prompt, as_params(params), tenant=tenant, cache_salt=cache_salt, listener=pieces.append
        )
        return self._stream(job, pieces)

    def on_step(self, subscriber: StepSubscriber) -> Callable[[], None]:
        """Call `subscriber` with `StepStats` after every step. Returns a function that ends it."""
        return self.core.on_step(subscriber)

    def step(self) -> None:
        """Run one step, for those who drive the engine themselves."""
        with self._watchdog.step():
            ran = self.core.step()
        if not ran and self.core.is_waiting:
            sleep(_GRAMMAR_POLL_S)

    def close(self) -> None:
        """End what runs and give back the memory."""
        self.core.close()
        self._watchdog.close()

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

    def _stream(self, job: Job, pieces: list[Piece]) -> Iterator[Piece]:
        self.core.submit(job)
        try:
            while True:
                for piece in pieces:
                    if piece.output is not None and piece.output.error is not None:
                        raise piece.output.error
                    yield piece
                    if piece.output is not None:
                        return
                pieces.clear()
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

    def __call__(self, piece: Piece) -> None:
        if piece.output is not None:
            self._outputs[self._index] = piece.output
            if self._progress is not None:
                done = sum(output is not None for output in self._outputs)
                self._progress(done, len(self._outputs))


def as_priority(priority: str | Priority) -> Priority:
    """A priority from its name.

    Raises:
        RequestError: no such class.
    """
    if isinstance(priority, Priority):
        return priority
    names = {p.name.lower(): p for p in Priority}
    if priority not in names:
        raise RequestError(f"priority must be one of {', '.join(names)}, got {priority!r}")
    return names[priority]


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist") and not isinstance(
        prompts, memoryview
    ):  # an array of token ids, or of prompts
        prompts = prompts.tolist()
    check_items(prompts)
    items = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [cast(list[int], items)]
    return cast(list[Prompt], items)


def as_params(params: Params | None) -> SamplingParams:
    """Sampling parameters from an object, a dict of its fields, or None for the defaults.

    Raises:
        RequestError: an unknown field, one out of range, or something else.
    """
    if params is None or isinstance(params, SamplingParams):
        return params or SamplingParams()
    if not isinstance(params, Mapping):
        raise RequestError(f"params must be SamplingParams or a dict of its fields, got {params!r:.100}")
    return sampling_params(params)


def _as_params(params: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [as_params(params)] * count
    if not isinstance(params, Sequence):
        raise RequestError(
            f"params must be SamplingParams, a dict of its fields or a list, got {params!r:.100}"
        )
    if len(params) != count:
        raise RequestError(f"{count} prompts need one SamplingParams, or {count}, got {len(params)}")
    return [as_params(one) for one in params]
