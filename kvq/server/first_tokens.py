"""How fast first tokens come while somebody waits for one."""

from collections import deque
from collections.abc import Callable

_WINDOW_S = 10.0
_MIN_STARTS = 16  # first tokens within the window, below which no rate is believed


class FirstTokens:
    """Prompts that wait for their first token, and how many a second got theirs lately.

    Only time in which somebody waited counts: a server that is hardly used has few first tokens a second,
    which says nothing of how fast they would come.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.num_awaited = 0
        self._clock = clock
        self._awaited_s = 0.0  # in which somebody waited, up to the last look at the clock
        self._looked_s = clock()
        self._starts: deque[tuple[float, float]] = deque()  # (when, `_awaited_s` by then)

    def await_one(self) -> None:
        """A prompt came."""
        self._look()
        self.num_awaited += 1

    def leave(self, *, started: bool) -> None:
        """Its first token came, or will not come."""
        now = self._look()
        self.num_awaited -= 1
        if started:
            self._starts.append((now, self._awaited_s))

    def per_s(self) -> float | None:
        """First tokens a second; None where too little is known."""
        self._look()
        if len(self._starts) < _MIN_STARTS:
            return None
        return len(self._starts) / max(self._awaited_s - self._starts[0][1], 1e-3)

    def _look(self) -> float:
        now = self._clock()
        if self.num_awaited:
            self._awaited_s += now - self._looked_s
        self._looked_s = now
        while self._starts and now - self._starts[0][0] > _WINDOW_S:
            self._starts.popleft()
        return now
