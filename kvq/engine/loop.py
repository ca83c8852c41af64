"""The loop that every engine runs in: do what was asked for, then take a step."""

import queue
import weakref
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

from kvq.engine.build import build
from kvq.engine.core import EngineCore
from kvq.engine.watchdog import Watchdog
from kvq.formats import KVRecipe
from kvq.models import Model
from kvq.models.resolve import ModelSource
from kvq.models.stays_here import StaysHere

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

    def close(self) -> None:
        """End the watchdog."""
        self.watchdog.close()


class LoopedEngine(StaysHere):
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
        self._start()

    @property
    def model(self) -> Model:
        """The model that runs."""
        return self.core.model

    def _start(self) -> None:
        """Begin what runs beside it."""
