"""Engine loop: alternates between commands from other threads and engine steps, under a watchdog."""

import logging
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from kvq.engine.build import build
from kvq.engine.params import SamplingParams
from kvq.engine.requests.defaults import read_defaults
from kvq.engine.steps.core import EngineCore
from kvq.errors import ConfigError
from kvq.formats import KVRecipe
from kvq.models import Model
from kvq.models.describe.resolve import ModelSource
from kvq.models.parts.fork_guard import NotCopyable

if TYPE_CHECKING:  # msgspec is not needed without it
    from kvq.engine.handover.handover import HandOver

_log = logging.getLogger("kvq")


class _Watchdog:
    """Thread that reports a step once it exceeds its deadline, since the step's own thread is busy."""

    def __init__(self, deadline_s: float, on_stuck: Callable[[float], object] | None = None) -> None:
        """`on_stuck`: called in the watchdog's thread with the seconds that the step has taken so far."""
        self.deadline_s = deadline_s
        self._on_stuck = on_stuck
        self.began: float | None = None  # of the current step, by `monotonic`; set by the code that runs it
        self._wake = threading.Event()  # set to end the thread
        self._thread = threading.Thread(target=self._watch, name="kvq-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and wait for it."""
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Tell the thread to end soon, without waiting for it."""
        self._wake.set()

    def _watch(self) -> None:
        reported: float | None = None
        while not self._wake.wait(min(1.0, self.deadline_s / 4)):
            began = self.began
            if began is None or began == reported or monotonic() - began < self.deadline_s:
                continue
            reported = began
            taken = monotonic() - began
            _log.error("a step has taken %.1f s, its deadline is %.1f s", taken, self.deadline_s)
            try:
                if self._on_stuck is not None:
                    self._on_stuck(taken)
            except Exception:  # noqa: BLE001 - a callback must not end the watch
                _log.exception("the callback for stuck steps failed")


_GRAMMAR_POLL_S = 0.002
Command = Callable[[], object]


class EngineLoop:  # D237: one loop for LLM, AsyncLLM and worker
    """Loop that steps engines under a watchdog and runs commands from other threads between steps."""

    def __init__(
        self,
        core: EngineCore,
        on_stuck: Callable[[float], object] | None = None,
        others: Sequence[EngineCore] = (),
    ) -> None:
        """`on_stuck`: called in the watchdog's thread if a step exceeds its deadline. `others`: engines that
        take turns with `core`, and have no work when idle.
        """
        self.core, self._cores = core, (core, *others)
        self.watchdog = _Watchdog(core.config.step_deadline_s, on_stuck)
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def ask(self, command: Command | None) -> None:
        """Queue a command for the loop's thread; None ends the loop. May be called from any thread."""
        self._commands.put(command)

    def wake(self) -> None:
        """Make an idle loop look for work. May be called from any thread."""
        self._commands.put(lambda: None)

    @property
    def has_work(self) -> bool:
        """True while any engine has work."""
        return any(core.has_work for core in self._cores)

    def step(self) -> bool:
        """Run a step of each engine; return False if none ran. Sleep briefly if all wait for grammars."""
        ran = False
        for core in self._cores:
            self.watchdog.began = monotonic()
            try:
                ran |= core.step()
            finally:
                self.watchdog.began = None
        if not ran and self.has_work:
            sleep(_GRAMMAR_POLL_S)
        return ran

    def obey(self, *, timeout_s: float | None = None) -> bool:
        """Run queued commands; if idle, wait up to `timeout_s` for one. Return False to end the loop.

        Does not wait after work that was left for idle time: it may have something to tell.
        """
        block, has_worked = not self.has_work, False
        while block and self._commands.empty() and self.core.upkeep.when_idle():
            block, has_worked = not self.has_work, True
        block = block and not has_worked
        if block and (due_s := self.core.upkeep.wait_s()) is not None:
            timeout_s = due_s if timeout_s is None else min(timeout_s, due_s)
        while True:
            try:
                command = self._commands.get(block=block, timeout=timeout_s)
            except queue.Empty:
                return True
            block = False
            if command is None:
                return False
            command()

    def left(self) -> list[Command]:
        """Remove and return the commands that `obey` has not run."""
        commands = []
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                commands.append(command)
        return commands


class LoopedEngine(NotCopyable):
    """Engine with its loop; base class of `LLM` and `AsyncLLM`."""

    def __init__(
        self,
        model: str | Path | ModelSource | Model,
        kv: str | KVRecipe = "auto",
        *,
        on_stuck: Callable[[float], object] | None = None,
        **options: Any,
    ) -> None:
        """Build the engine. `model`: a folder or a name to load, or a model from `kvq.load`.

        Options are the fields of `EngineConfig` and, if the model is not loaded yet, options of `kvq.load`.
        `on_stuck`: called in the watchdog's thread if a step exceeds its deadline.

        Raises:
            ModelError: the model is missing, damaged or refused.
            ConfigError: an option is unknown or out of range.
            OutOfMemory: the pools don't fit in memory.
        """
        loaded, config = build(model, kv, options)
        self.core = EngineCore(loaded, config)
        self._loop = EngineLoop(self.core, on_stuck)
        weakref.finalize(self, self._loop.watchdog.stop)  # in case `close` is not called
        self._is_ending = sys.is_finalizing  # at exit, modules are torn down before their objects
        self._start()

    @property
    def model(self) -> Model:
        """The engine's model."""
        return self.core.model

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the model's generation_config.json recommends.

        They are not applied automatically. Fields missing from the file keep their defaults: greedy, 64
        tokens.
        """
        return SamplingParams(**read_defaults(self.model.prepared.folder).fill({}, ()))

    @property
    def hand_over(self) -> "HandOver":
        """Hand-overs to and from other engines. Raises ConfigError if the engine has no address for them."""
        if self.core.handover is None:
            raise ConfigError("hand-overs need hand_over_to or hand_over_listen, the address of an engine")
        return self.core.handover

    def _start(self) -> None:
        """Start the threads of a subclass."""
