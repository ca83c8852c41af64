"""The loop that every engine runs in: do what was asked for, then take a step, under a watchdog."""

import logging
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from kvq.engine.build import build
from kvq.engine.params import SamplingParams
from kvq.engine.requests.defaults import read_defaults
from kvq.engine.steps.core import EngineCore
from kvq.formats import KVRecipe
from kvq.models import Model
from kvq.models.describe.resolve import ModelSource
from kvq.models.parts.fork_guard import NotCopyable

_log = logging.getLogger("kvq")


class Watchdog:
    """A thread that reports, once per step, a step that exceeds its deadline: the step's own thread can't."""

    def __init__(self, deadline_s: float, on_stuck: Callable[[float], object] | None = None) -> None:
        """`on_stuck` is called from the watchdog's thread with the seconds the step has taken so far."""
        self.deadline_s = deadline_s
        self._on_stuck = on_stuck
        self._began: float | None = None
        self._wake = threading.Event()  # set to end the thread
        self._thread = threading.Thread(target=self._watch, name="kvq-watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """The time inside is watched."""
        self._began = monotonic()
        try:
            yield
        finally:
            self._began = None

    def close(self) -> None:
        """End the thread and wait for it."""
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Let the thread end soon."""
        self._wake.set()

    def _watch(self) -> None:
        reported: float | None = None
        while not self._wake.wait(min(1.0, self.deadline_s / 4)):
            began = self._began
            if began is None or began == reported or monotonic() - began < self.deadline_s:
                continue
            reported = began
            taken = monotonic() - began
            _log.error("a step has taken %.1f s, its deadline is %.1f s", taken, self.deadline_s)
            try:
                if self._on_stuck is not None:
                    self._on_stuck(taken)
            except Exception:  # noqa: BLE001 - somebody else's code must not end the watch
                _log.exception("who was told of a stuck step failed")


_GRAMMAR_POLL_S = 0.002
Command = Callable[[], object]


class EngineLoop:
    """Steps one engine under a watchdog, and does between steps what other threads ask for."""

    def __init__(self, core: EngineCore, on_stuck: Callable[[float], object] | None = None) -> None:
        """`on_stuck` is told, in the watchdog's thread, of a step beyond its deadline."""
        self.core = core
        self.watchdog = Watchdog(core.config.step_deadline_s, on_stuck)
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def ask(self, command: Command | None) -> None:
        """Let the loop's thread do something soon; None: let it end. May be called from any thread."""
        self._commands.put(command)

    def step(self) -> bool:
        """Run one step; False if there was nothing to run. Waits a little where work waits for grammars."""
        with self.watchdog.step():
            ran = self.core.step()
        if not ran and self.core.has_work:
            sleep(_GRAMMAR_POLL_S)
        return ran

    def obey(self, *, timeout_s: float | None = None) -> bool:
        """Do what was asked for; while there is no work, wait for something, or so long. False: end."""
        block = not self.core.has_work
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
        """What was asked for and will not be done by `obey` any more."""
        commands = []
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                commands.append(command)
        return commands


class LoopedEngine(NotCopyable):
    """An engine and its loop: what `LLM` and `AsyncLLM` are."""

    def __init__(
        self,
        model: str | Path | ModelSource | Model,
        kv: str | KVRecipe = "auto",
        *,
        on_stuck: Callable[[float], object] | None = None,
        **options: Any,
    ) -> None:
        """`model`: a folder, a name, or what `kvq.load` returned. Options are those of `EngineConfig`
        and, unless the model is loaded already, of `kvq.load`. `on_stuck` is told, in the watchdog's thread,
        of a step beyond its deadline.

        Raises:
            ModelError: missing, damaged or refused model.
            ConfigError: an unknown option, or one out of range.
            OutOfMemory: the pools don't fit.
        """
        loaded, config = build(model, kv, options)
        self.core = EngineCore(loaded, config)
        self._loop = EngineLoop(self.core, on_stuck)
        weakref.finalize(self, self._loop.watchdog.stop)  # for those who forget to close
        self._is_ending = sys.is_finalizing  # at the end of a program modules go before what they made
        self._start()

    @property
    def model(self) -> Model:
        """The model that runs."""
        return self.core.model

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends, to hand to `generate` or to change; nothing
        takes it by itself. Greedy, of 64 tokens, where that says nothing.
        """
        return SamplingParams(**read_defaults(self.model.prepared.folder).fill({}, ()))

    def _start(self) -> None:
        """Begin what runs beside it."""
