"""`kvq.AsyncLLM`: the engine for asyncio, with streaming and cancellation."""

import asyncio
import atexit
import logging
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Self, Unpack

from kvq.engine.loop import Command, LoopedEngine
from kvq.engine.params import HintAction, Params, as_params
from kvq.engine.requests.outputs import Event, Piece, RequestOutput, as_piece
from kvq.engine.requests.request_options import Prompt, RequestFields, RequestOptions
from kvq.engine.requests.request_state import Job
from kvq.engine.requests.sessions import check_action
from kvq.engine.steps.publisher import StepStats, StepSubscriber
from kvq.errors import EngineError, KVQError
from kvq.kernels.other_threads import end_team
from kvq.models.parts.fork_guard import Home

_log = logging.getLogger("kvq")


class AsyncLLM(LoopedEngine):
    """Engine that runs its steps in a separate thread.

        async with kvq.AsyncLLM("tiny", kv="int4") as engine:
            async for piece in engine.stream("Once upon", kvq.SamplingParams(max_tokens=64)):
                print(piece.text, end="")

    Leaving a stream early, or cancelling its task, cancels the request within one step.
    """

    def _start(self) -> None:
        self._error: KVQError | None = None  # the reason if no command is accepted any more
        self._lock = threading.Lock()  # held to set the error, and to send commands if it is not set
        if self.core.handover is not None:
            self.core.handover.wake = self._loop.wake
        self._thread = threading.Thread(target=self._run, name=Home.ENGINE_THREAD, daemon=True)
        end_team()  # the team of this thread, which loaded the model
        self._thread.start()
        self._is_leaving = False
        atexit.register(self._leave)  # Python aborts if it shuts down while a thread computes

    async def stream(
        self, prompt: Prompt, params: Params | None = None, **options: Unpack[RequestFields]
    ) -> AsyncIterator[Piece]:
        """Yield pieces of one prompt's results as they are generated; the last piece carries the complete
        `output`.

        `options`: fields of `RequestOptions`, such as `priority`, `tenant`, `cache_salt` or `session`.

        Raises:
            RequestError: the request can't be served, or it failed while running.
            EngineError: the engine was closed or has failed.
        """
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(event: Event) -> None:
            try:
                loop.call_soon_threadsafe(events.put_nowait, event)
            except RuntimeError:  # the event loop was closed, so no one is listening any more
                self._ask(partial(self.core.cancel, job), quiet=True)

        given = RequestOptions(params=as_params(params), **options)
        job = self.core.intake.new_job(prompt, given, listener=tell)
        self._ask(partial(self._submit, job))
        try:
            while True:
                piece = as_piece(await events.get())
                yield piece
                if piece.output is not None:
                    return
        finally:
            self._ask(partial(self.core.cancel, job), quiet=True)

    async def generate(
        self, prompt: Prompt, params: Params | None = None, **options: Unpack[RequestFields]
    ) -> RequestOutput:
        """Return one prompt's results once they are complete. The arguments are those of `stream`.

        Raises:
            RequestError: the request can't be served, or it failed while running.
        """
        output: RequestOutput | None = None
        async for piece in self.stream(prompt, params, **options):
            output = piece.output
        assert output is not None, "a stream ends with the output"
        return output

    def hint(
        self, session: str, action: HintAction, seconds: float | None = None, *, tenant: str = ""
    ) -> None:
        """Say what should happen to a session's KV; see `Sessions.hint`. Unknown sessions are ignored.

        Raises:
            RequestError: the action is unknown.
        """
        check_action(action)
        self._ask(partial(self.core.sessions.hint, tenant, session, action, seconds))

    def on_step(self, subscriber: StepSubscriber) -> Callable[[], None]:
        """Call `subscriber` with `StepStats` after every step, in the engine's thread.

        Returns a function that unsubscribes; it may be called from any thread.
        """
        is_on = threading.Event()
        is_on.set()

        def tell(stats: StepStats) -> None:
            if is_on.is_set():
                subscriber(stats)
            else:
                unsubscribe.pop()()

        unsubscribe: list[Callable[[], None]] = []
        self._ask(lambda: unsubscribe.append(self.core.on_step(tell)))
        return is_on.clear

    def close(self) -> None:  # D245: if left open, ended silently by `atexit`
        """Cancel all requests, end the thread and release the memory. May be called again."""
        atexit.unregister(self._leave)
        if self._thread.is_alive():
            self._loop.ask(None)
            self._thread.join()
        self._loop.watchdog.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def _leave(self) -> None:
        """Stop the engine's thread when the program exits, without raising errors for waiting callers."""
        self._is_leaving = True
        self.close()

    def _ask(self, command: Command, *, quiet: bool = False) -> None:
        with self._lock:
            if self._error is None:
                self._loop.ask(command)
                return
        if not quiet:
            raise self._error

    def _run(self) -> None:
        try:
            while self._loop.obey():
                if self.core.has_work:
                    self._loop.step()
            if not self._is_leaving:
                self._end(EngineError("the engine was closed"))
        except BaseException as error:  # whatever ends this thread, no caller may wait forever
            self._end(EngineError(f"the engine broke down: {type(error).__name__}: {error}"))
            raise

    def _submit(self, job: Job) -> None:
        try:
            self.core.submit(job)
        except KVQError as error:
            self.core.refuse(job, self._error or error)
        except Exception as error:  # noqa: BLE001 - affects only this request, whatever is wrong with it
            _log.exception("request %s could not be queued", job.id)
            self.core.refuse(job, EngineError(f"it could not be queued: {type(error).__name__}: {error}"))

    def _end(self, error: KVQError) -> None:
        """Reject all further commands, and end all waiting requests with `error`."""
        with self._lock:
            self._error = error
        self.core.close(error)
        for command in self._loop.left():
            command()
