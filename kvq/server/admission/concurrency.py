"""Who has a seat at the engine, who waits for one, and how fast first tokens come, by what came and went.

The engine lets prompts begin in the order in which they came, as far as its seats reach. So who waits is
known at once, whatever step the engine is in; what it says of itself is a step old, and a burst lies between.
"""

from collections import deque
from collections.abc import Callable

_MANY = 1 << 62


class Seats:
    """What one request needs: a seat for each of its sequences, until that ends.

    The sequences of one prompt begin together: while fewer seats are free, it waits.
    """

    def __init__(self, *, prompts: int = 1, sequences: int = 1) -> None:
        """`sequences`: of each prompt."""
        self.at_once = sequences
        self.coming = prompts * sequences  # without a first token
        self.held = 0


class Seating:
    """The seats of the requests at hand. A request has one as soon as its first prompt does."""

    def __init__(self, num_seats: Callable[[], int | None]) -> None:
        """`num_seats`: the engine's, None while it has not said how many."""
        self._num_seats = num_seats
        self._num_held = 0
        self._coming: dict[Seats, None] = {}  # with sequences that come, in their order
        self._num_new = 0  # of these, without any seat that is sure

    @property
    def num_waiting(self) -> int:
        """Requests without a seat. O(seats)."""
        return self._look()[0]

    def has_room(self, seats: Seats) -> bool:
        """Whether a request would find its seats free if it came now."""
        return seats.at_once <= self._look()[1]

    def enter(self, seats: Seats) -> None:
        """A request came."""
        self._coming[seats] = None
        self._num_new += 1

    def begin(self, seats: Seats, count: int) -> None:
        """So many of its sequences have their first token, maybe before others that came earlier."""
        self._change(seats, coming=-count, held=count)

    def end(self, seats: Seats, count: int, *, begun: bool) -> None:
        """So many of its sequences ended; `begun`: they had their first token."""
        self._change(seats, coming=0 if begun else -count, held=-count if begun else 0)

    def leave(self, seats: Seats) -> None:
        """It is over."""
        self._change(seats, coming=-seats.coming, held=-seats.held)

    def _change(self, seats: Seats, *, coming: int, held: int) -> None:
        is_new = seats in self._coming and not seats.held
        seats.coming += coming
        seats.held += held
        self._num_held += held
        if not seats.coming:
            self._coming.pop(seats, None)
        self._num_new += (seats in self._coming and not seats.held) - is_new

    def _look(self) -> tuple[int, int]:
        """(requests that wait, seats that are free for who comes now)."""
        most = self._num_seats()
        free = (_MANY if most is None else most) - self._num_held
        num_new = self._num_new
        for seats in self._coming:
            if min(seats.at_once, seats.coming) > free:
                return num_new, 0  # and those behind it
            free -= seats.coming
            num_new -= not seats.held
        return 0, free


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
