"""`kvq.AsyncLLM`: the engine for asyncio, with streaming and cancellation."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import sleep
from typing import Any, Self

from kvq.engine.build import build
from kvq.engine.core import EngineCore, StepSubscriber
from kvq.engine.here import StaysHere
from kvq.engine.job import Job
from kvq.engine.llm import Params, Prompt, as_params, as_priority
from kvq.engine.outputs import Piece, RequestOutput
from kvq.engine.stats import StepStats
from kvq.engine.watchdog import Watchdog
from kvq.errors import EngineError, KVQError
from kvq.formats import KVRecipe
from kvq.kernels.neighbours import end_team
from kvq.models import Model
from kvq.models.resolve import ModelSource
from kvq.scheduler import Priority

_log = logging.getLogger("kvq")
_IDLE_POLL_S = 0.002
_Command = tuple[str, Any]


class AsyncLLM(StaysHere):
    """An engine that steps in a thread of its own.

        async with kvq.AsyncLLM("tiny", kv="int4") as engine:
            async for piece in engine.stream("Once upon", kvq.SamplingParams(max_tokens=64)):
                print(piece.text, end="")

    Leaving a stream early, or cancelling its task, cancels the request within a step.
    """

    def __init__(
        self,
        model: str | Path | ModelSource | Model,
        kv: str | KVRecipe = "auto",
        *,
        on_stuck: Callable[[float], object] | None = None,
        **options: Any,
    ) -> None:
        """As `kvq.LLM`; `on_stuck` is told, in the watchdog's thread, of a step beyond its deadline."""
        loaded, config = build(model, kv, options)
        self.core = EngineCore(loaded, config)
        self.watchdog = Watchdog(config.step_deadline_s, on_stuck)
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._error: KVQError | None = None  # why no command is taken any more
        self._lock = threading.Lock()  # held to set it, and to send unless it is set
        self._thread = threading.Thread(target=self._loop, name="kvq-engine", daemon=True)
        end_team()  # this thread's, with which the model was loaded
        self._thread.start()

    @property
    def model(self) -> Model:
        """The model that runs."""
        return self.core.model

    async def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        priority: str | Priority = Priority.INTERACTIVE,
        tenant: str = "",
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[Piece]:
        """Pieces of one prompt's results as they come; the last one has the whole `output`. `cache_salt`:
        cached prefixes are shared only with requests of the tenant that name the same.

        Raises:
            RequestError: the request can't be served, or failed while it ran.
            EngineError: the engine was closed or broke down.
        """
        pieces: asyncio.Queue[Piece | KVQError] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(piece: Piece | KVQError) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        job = self.core.new_job(
            prompt,
            as_params(params),
            priority=as_priority(priority),
            tenant=tenant,
            cache_salt=cache_salt,
            request_id=request_id,
            listener=tell,
        )
        self._send("submit", job)
        try:
            while True:
                piece = await pieces.get()
                if isinstance(piece, KVQError):
                    raise piece
                if piece.output is not None and piece.output.error is not None:
                    raise piece.output.error
                yield piece
                if piece.output is not None:
                    return
        finally:
            self._send("cancel", job, quiet=True)

    async def generate(self, prompt: Prompt, params: Params | None = None, **options: Any) -> RequestOutput:
        """One prompt's results when they are complete; options are those of `stream`.

        Raises:
            RequestError: the request can't be served, or failed while it ran.
        """
        output: RequestOutput | None = None
        async for piece in self.stream(prompt, params, **options):
            output = piece.output
        assert output is not None, "a stream ends with the output"
        return output

    def on_step(self, subscriber: StepSubscriber) -> Callable[[], None]:
        """Call `subscriber` with `StepStats` after every step, in the engine's thread.

        Returns a function that ends it; it may be called from any thread.
        """
        is_on = threading.Event()
        is_on.set()

        def tell(stats: StepStats) -> None:
            if is_on.is_set():
                subscriber(stats)
            else:
                unsubscribe.pop()()

        unsubscribe: list[Callable[[], None]] = []
        self._send("on_step", (tell, unsubscribe))
        return is_on.clear

    def close(self) -> None:
        """Cancel what runs, end the thread, give back the memory. May be called again."""
        if self._thread.is_alive():
            self._commands.put(("close", None))
            self._thread.join()
        self.watchdog.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def _send(self, name: str, what: Any, *, quiet: bool = False) -> None:
        with self._lock:
            if self._error is None:
                self._commands.put((name, what))
                return
        if not quiet:
            raise self._error

    def _loop(self) -> None:
        try:
            while self._obey():
                if not self.core.has_work:
                    continue
                with self.watchdog.step():
                    ran = self.core.step()
                if not ran:
                    sleep(_IDLE_POLL_S)
            self._end(EngineError("the engine was closed"))
        except BaseException as error:  # whatever ends this thread, nobody may wait for it for ever
            self._end(EngineError(f"the engine broke down: {type(error).__name__}: {error}"))
            raise

    def _obey(self) -> bool:
        """Do what was asked for; wait for something while there is no work. False: close."""
        block = not self.core.has_work
        while True:
            try:
                name, what = self._commands.get(block=block)
            except queue.Empty:
                return True
            block = False
            if name == "close":
                return False
            self._do(name, what)

    def _do(self, name: str, what: Any) -> None:
        if name == "submit":
            self._submit(what)
        elif name == "cancel":
            self.core.cancel(what)
        else:
            subscriber, unsubscribe = what
            unsubscribe.append(self.core.on_step(subscriber))

    def _submit(self, job: Job) -> None:
        try:
            self.core.submit(job)
        except KVQError as error:
            self._tell(job, error)
        except Exception as error:  # noqa: BLE001 - this request's alone, whatever is wrong with it
            _log.exception("request %s could not be queued", job.request.id)
            self._tell(job, EngineError(f"it could not be queued: {type(error).__name__}: {error}"))

    def _tell(self, job: Job, error: KVQError) -> None:
        if job.listener is None:
            return
        try:
            job.listener(error)  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001 - its event loop is gone, say; the others must hear of theirs
            _log.exception("the listener of request %s failed", job.request.id)

    def _end(self, error: KVQError) -> None:
        """Take no more commands and answer everybody who still waits."""
        with self._lock:
            self._error = error
        self.core.close(error)
        while not self._commands.empty():
            name, what = self._commands.get()
            if name == "submit":
                self._tell(what, error)
