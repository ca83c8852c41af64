"""A thread that notices when a step takes too long: the step's own thread can't."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

_log = logging.getLogger("kvq")


class Watchdog:
    """Reports, once per step, a step that exceeds its deadline."""

    def __init__(self, deadline_s: float, on_stuck: Callable[[float], object] | None = None) -> None:
        """`on_stuck` is called from the watchdog's thread with the seconds the step has taken so far."""
        self.deadline_s = deadline_s
        self.num_stuck = 0
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
            self.num_stuck += 1
            taken = monotonic() - began
            _log.error("a step has taken %.1f s, its deadline is %.1f s", taken, self.deadline_s)
            if self._on_stuck is not None:
                self._tell(self._on_stuck, taken)

    def _tell(self, on_stuck: Callable[[float], object], taken: float) -> None:
        try:
            on_stuck(taken)
        except Exception:  # noqa: BLE001 - somebody else's code must not end the watch
            _log.exception("who was told of a stuck step failed")
