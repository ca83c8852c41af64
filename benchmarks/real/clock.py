"""Clock of a run: estimates the remaining time from earlier measurements."""

import sys
import time
from collections.abc import Callable, Sequence
from statistics import mean

_EVERY_S = 5.0


class Clock:
    """Tells of one measurement after the other, and of the time left."""

    def __init__(self, known: Callable[[str, str], list[float]], todo: Sequence[tuple[str, str]]) -> None:
        """`known`: seconds of measurements of (model, part). `todo`: those that are left, in their order."""
        self._known = known
        self._todo = list(todo)
        self._told_s = self._began_s = time.monotonic()
        self._title = ""

    def begin(self, title: str) -> None:
        """The next one begins."""
        self._title = title
        self._began_s = self._told_s = time.monotonic()
        print(f"{title} ... {self._left(0.0)}", flush=True)

    def progress(self, done: int, total: int) -> None:
        """Report how much is done."""
        now = time.monotonic()
        if now - self._told_s >= _EVERY_S or (done == total and now - self._began_s >= _EVERY_S):
            self._told_s = now
            print(f"  {done} of {total}; {self._left(done / total)}", file=sys.stderr, flush=True)

    def end(self) -> float:
        """It is done; returns its seconds."""
        self._todo.pop(0)
        return time.monotonic() - self._began_s

    def _left(self, share: float) -> str:
        """In words. What runs is taken to go on as it went, others to take what theirs took before."""
        guesses = [self._known(*one) for one in self._todo[1:]]
        spent = time.monotonic() - self._began_s
        before = self._known(*self._todo[0])
        own = spent / share * (1 - share) if share else mean(before) if before else None
        later = sum(mean(one) for one in guesses if one)
        unknown = (own is None) + sum(not one for one in guesses)
        words = f"{len(self._todo)} to do, about {((own or 0.0) + later) / 60:.1f} min"
        return words + (f" without {unknown} never timed" if unknown else "")
