"""Remote engine: starts and monitors the engine process, and restarts it when it ends."""

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from time import monotonic

import msgspec

from kvq.engine import Piece
from kvq.engine.requests.request_options import RequestOptions
from kvq.errors import BrokenFormat, ConfigError, EngineError, KVQError
from kvq.server.engine import messages
from kvq.server.engine.frames import from_engine, read_async
from kvq.server.engine.messages import Ended, EngineSnapshot
from kvq.server.engine.process import EngineProcess

_log = logging.getLogger("kvq")
_RESTART_WINDOW_S = 600.0
_START_S = 1800.0  # limit for loading the model
_FIRST_DELAY_S = 0.5  # delay before restarting an engine that was never ready; doubled each time


class State(Enum):
    """State of the engine process."""

    STARTING = "starting"  # the first time
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"  # refused to start, or its restarts are used up
    STOPPED = "stopped"  # until `start` is called again
    CLOSED = "closed"


_Heard = Piece | Ended | EngineError


@dataclass(slots=True, eq=False)
class _Stream:
    """Messages of a request: queued for the reader, and passed to `on_message` on arrival."""

    on_message: Callable[[_Heard], object]
    queue: asyncio.Queue[_Heard | TimeoutError] = field(default_factory=asyncio.Queue)

    def put(self, message: _Heard) -> None:
        self.on_message(message)
        self.queue.put_nowait(message)


class Remote:
    """Engine in a separate process.

        remote = Remote(Start(folder="/models/llama", kv="int4", options={}))
        await remote.start()
        async for message in remote.stream([1, 2, 3], RequestOptions()): ...
        await remote.close()

    If the process ends or stops responding, all waiting requests get an `EngineError` immediately, and the
    process is restarted, at most `max_restarts` times in ten minutes. Make all calls from one event loop.
    """

    def __init__(
        self,
        start: messages.Start,
        *,
        max_restarts: int = 5,
        ping_s: float = 0.5,
        stall_s: float = 4.0,
        on_failed: Callable[[KVQError], object] | None = None,
    ) -> None:
        """`max_restarts`: limit per ten minutes. `ping_s`: time between pings. `stall_s`: time without a
        reply before the process is killed. `on_failed`: called with the error if the engine fails for good.
        """
        self.state = State.STARTING
        self.info: messages.Ready | None = None  # description of the engine, set when it is first ready
        self.gauges: messages.Gauges | None = None  # gauges of the running process
        self.num_restarts = 0
        self.num_starts = 0  # processes that became ready
        self.on_stepped: Callable[[messages.Stepped], object] | None = None  # called after every step
        self._start, self._on_failed = start, on_failed
        self._max_restarts, self._ping_s, self._stall_s = max_restarts, ping_s, stall_s
        self._numbers = itertools.count()
        self._streams: dict[int, _Stream] = {}
        self._looking: asyncio.Future[EngineSnapshot] | None = None  # shared by all callers of `look`
        self._changing: dict[str, asyncio.Future[KVQError | None]] = {}  # by the adapter's name
        self._process: EngineProcess | None = None
        self._restarts: deque[float] = deque()
        self._delay_s = 0.0  # delay before the next process starts
        self._life: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Process id of the engine, or None if it is not running."""
        return None if self._process is None else self._process.popen.pid

    @property
    def num_slots(self) -> int | None:
        """Maximum number of concurrent sequences in the engine, or None before it is ready."""
        return None if self.info is None else self.info.scheduler.max_num_seqs

    async def start(self) -> messages.Ready:
        """Start the process, also again after `stop` or a failure, and wait until its engine is ready.

        Raises:
            ConfigError: the engine can't be built; the message states the reason.
            EngineError: after `max_restarts` restarts, the process ended or took too long to start.
        """
        if self.state in (State.STOPPED, State.FAILED):
            if self._life is not None:
                await asyncio.gather(self._life, return_exceptions=True)
            self._set(State.STARTING)
        self._life = asyncio.create_task(self._live())
        while self.state in (State.STARTING, State.RESTARTING):
            self._changed.clear()
            await self._changed.wait()
        if self.state is not State.READY:
            await asyncio.gather(self._life)
        assert self.info is not None, "a ready engine said what it is"
        return self.info

    async def stream(
        self,
        prompt: Sequence[int],
        options: RequestOptions,
        *,
        timeout_s: float | None = None,
        on_message: Callable[[Piece | Ended | EngineError], object] = lambda message: None,
    ) -> AsyncGenerator[Piece | Ended]:
        """Yield the messages of a request up to its `Ended`. Closing the generator early cancels the request.

        `on_message`: called with every message on arrival, even if the reader of the generator is slower.

        Raises:
            EngineError: no engine is ready, or the engine ended before the request.
            TimeoutError: the request did not end in time and was cancelled.
        """
        process = self._ready_process()
        number = next(self._numbers)
        stream = self._streams[number] = _Stream(on_message)
        timer = None
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(timeout_s, stream.queue.put_nowait, TimeoutError())
        ended = False
        try:
            await process.send(messages.Submit(number=number, prompt=messages.pack(prompt), options=options))
            while not ended:
                message = await stream.queue.get()
                if isinstance(message, EngineError | TimeoutError):
                    raise message
                ended = isinstance(message, Ended)
                yield message
        finally:
            if timer is not None:
                timer.cancel()
            del self._streams[number]
            if not ended and process is self._process:
                process.say(number)

    def hint(self, hint: messages.Hint) -> None:
        """Pass on a hint about a session. Raise EngineError if no engine is ready."""
        self._ready_process().say(hint)

    async def look(self) -> EngineSnapshot:
        """Return a snapshot of the engine, taken after the current step.

        Raises:
            EngineError: no engine is ready, or the engine ended before sending the snapshot.
        """
        process = self._ready_process()
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_future()
            process.say("look")
        return await asyncio.shield(self._looking)

    async def change_adapter(self, name: str, folder: str | None) -> None:
        """Load an adapter from a folder, or unload it if `folder` is None; engines to come do the same.

        Raises:
            ConfigError: the engine refused it; the message says why.
            EngineError: no engine is ready, or the engine ended before it answered.
        """
        process = self._ready_process()
        if name in self._changing:
            raise ConfigError(f"adapter {name!r} is being loaded or unloaded; try again when that is done")
        done = self._changing[name] = asyncio.get_running_loop().create_future()
        try:
            process.say(messages.ChangeAdapter(name=name, folder=folder))
            if error := await done:
                raise error
        finally:
            del self._changing[name]
        known = {key: own for key, own in self._start.options.get("adapters", {}).items() if key != name}
        known |= {} if folder is None else {name: folder}
        self._start = msgspec.structs.replace(self._start, options=self._start.options | {"adapters": known})

    def hand_over(self) -> None:
        """Let the engine's requests go on in another one, if it knows one. Their results still come here."""
        if self._process is not None:
            self._process.say("drain")

    def _ready_process(self) -> EngineProcess:
        if self.state is not State.READY or self._process is None:
            raise EngineError(f"no engine is ready, it is {self.state.value}")
        return self._process

    async def stop(self) -> None:
        """End the process, whose memory becomes free, until `start` is called again."""
        await self._end(State.STOPPED)

    async def close(self) -> None:
        """End the process for good; waiting requests get an `EngineError`."""
        await self._end(State.CLOSED)

    async def _end(self, state: State) -> None:
        self._set(state)
        if self._life is not None:
            self._life.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError, ConfigError):
                await self._life

    # The process

    async def _live(self) -> None:
        """Run the engine process, and a new one each time it ends."""
        while True:
            await self._live_once()
            self._restart_or_raise()
            await asyncio.sleep(self._delay_s)

    async def _live_once(self) -> None:
        self._delay_s = max(2 * self._delay_s, _FIRST_DELAY_S)  # reset when it becomes ready
        try:
            process = self._process = await EngineProcess.spawn()
        except OSError as error:  # no memory, no descriptors
            _log.error("no engine process can be started: %s", error)
            return
        why = ""
        try:
            await self._serve(process)
        except (EngineError, TimeoutError) as error:
            why = f": {error or 'it took too long to start'}"
        finally:
            self._process = None
            self.gauges = None
            is_closing = self.state in (State.CLOSED, State.STOPPED)
            what = "the server is shutting down" if is_closing else "the engine ended; send the request again"
            ended = EngineError(what)
            for stream in self._streams.values():
                stream.put(ended)
            self._show(ended)
            for name in self._changing:
                self._changed_adapter(name, ended)
            if is_closing and not process.is_ready:
                process.popen.kill()  # loading may take minutes before it reads its socket
            await process.end()
            is_known = is_closing or self.state is State.FAILED  # a refused engine has sent its reason
            if not is_known:
                _log.error("the engine process ended with status %s%s", process.popen.returncode, why)

    async def _serve(self, process: EngineProcess) -> None:
        """Read messages from the engine until it ends."""
        receive = process.reader.readexactly
        await process.send(self._start)
        async with asyncio.timeout(_START_S):
            first = await read_async(receive, from_engine)
        if isinstance(first, messages.Refused):
            if first.may_pass and self.info is not None:  # it was ready before
                raise EngineError(first.reason)
            raise self._failed((BrokenFormat if first.breaks_model else ConfigError)(first.reason))
        if not isinstance(first, messages.Ready):
            return
        if self.info is not None and first.model_digest != self.info.model_digest:
            raise self._failed(
                ConfigError(
                    f"the model's files changed while they were served, from digest {self.info.model_digest} "
                    f"to {first.model_digest}; start the server again"
                )
            )
        self.info = first
        self._delay_s = 0.0
        if self.state is State.RESTARTING:
            _log.warning("the engine is ready again; restart %d since the server began", self.num_restarts)
        process.is_ready = True
        self.num_starts += 1
        self._set(State.READY)
        process.answered_s = monotonic()
        pinging = asyncio.create_task(self._ping(process))
        try:
            while (message := await read_async(receive, from_engine)) is not None:
                process.answered_s = monotonic()
                if isinstance(message, messages.Stepped):
                    self._take(message)
                elif isinstance(message, EngineSnapshot):
                    self._show(message)
                elif isinstance(message, messages.AdapterChanged):
                    error = None if message.error is None else ConfigError(message.error)
                    self._changed_adapter(message.name, error)
                elif message != "ping":
                    raise EngineError(f"the engine sent {type(message).__name__} while it runs")
        finally:
            pinging.cancel()
            if self.state is State.READY:
                self._set(State.RESTARTING)

    async def _ping(self, process: EngineProcess) -> None:
        """Ping the process; kill it if it does not reply, which means that it is stopped or blocked."""
        while True:
            process.say("ping")
            said = monotonic()
            await asyncio.sleep(self._ping_s)
            if monotonic() - said > self._ping_s + 1.0:  # the HTTP process itself was suspended
                process.answered_s = monotonic()
            if monotonic() - process.answered_s > self._stall_s:
                _log.error("the engine has not answered for %.1f s and is killed", self._stall_s)
                process.popen.kill()
                return

    def _take(self, message: messages.Stepped) -> None:
        items: list[tuple[int, Piece | Ended]] = [(int(piece.request_id), piece) for piece in message.pieces]
        items += [(ended.number, ended) for ended in message.ended]
        for number, item in items:
            if number in self._streams:  # otherwise no reader waits for the message
                self._streams[number].put(item)
        self.gauges = message.gauges
        if message.gauges.guard_fallback and not self._start.has_fallen_back:
            self._start = msgspec.structs.replace(
                self._start, has_fallen_back=True
            )  # also of the next engine
        if self.on_stepped is not None:
            self.on_stepped(message)

    def _restart_or_raise(self) -> None:  # D296: immediately if it was ready before; otherwise with delays
        now = monotonic()
        while self._restarts and now - self._restarts[0] > _RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            times = len(self._restarts) + 1
            raise self._failed(EngineError(f"the engine ended {times} times within ten minutes"))
        self._restarts.append(now)
        self.num_restarts += 1
        self._set(State.RESTARTING)

    def _failed(self, error: KVQError) -> KVQError:
        """Record that the engine has failed permanently, and return the error."""
        self._set(State.FAILED)
        if self._on_failed is not None:
            self._on_failed(error)
        return error

    def _show(self, found: EngineSnapshot | EngineError) -> None:
        looking, self._looking = self._looking, None
        if looking is None or looking.done():
            return
        if isinstance(found, EngineError):
            looking.set_exception(found)
            looking.exception()  # marks it as retrieved, even if no caller waits any more
        else:
            looking.set_result(found)

    def _changed_adapter(self, name: str, error: KVQError | None) -> None:
        if (done := self._changing.get(name)) is not None and not done.done():
            done.set_result(error)

    def _set(self, state: State) -> None:
        self.state = state
        self._changed.set()
