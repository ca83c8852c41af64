"""Engine slots: which requests are running or waiting.

The engine starts prompts in order of arrival while it has free slots, so the waiting requests can be derived
at any time, even during a step. The engine's own gauges are one step old and miss bursts since then.
"""

from collections.abc import Callable

_MANY = 1 << 62


class SequenceSlots:
    """Slots that one request needs: one per sequence, until that sequence ends.

    The sequences of one prompt start together; the prompt waits until enough slots are free for all of them.
    """

    def __init__(self, *, prompts: int = 1, sequences: int = 1) -> None:
        """`sequences`: number of sequences of each prompt."""
        self.at_once = sequences
        self.coming = prompts * sequences  # sequences without a first token
        self.held = 0


class EngineSlots:  # D299: counted here, since the engine's figures are a step old
    """Engine slots of all requests. A request has a slot as soon as its first prompt has one."""

    def __init__(self, num_slots: Callable[[], int | None]) -> None:
        """`num_slots` returns the engine's number of slots, or None while the number is unknown."""
        self._num_slots = num_slots
        self._num_held = 0
        self._coming: dict[
            SequenceSlots, None
        ] = {}  # requests with sequences that have not started, in order of arrival
        self._num_new = 0  # number of requests in `_coming` that have no slot

    @property
    def num_waiting(self) -> int:
        """Number of requests without a slot. O(slots)."""
        return self._look()[0]

    def has_room(self, slots: SequenceSlots) -> bool:
        """Return True if enough slots are free for a new request to start now."""
        return slots.at_once <= self._look()[1]

    def enter(self, slots: SequenceSlots) -> None:
        self._coming[slots] = None
        self._num_new += 1

    def begin(self, slots: SequenceSlots, count: int) -> None:
        """Record the first tokens of `count` sequences, possibly before sequences of earlier requests."""
        self._change(slots, coming=-count, held=count)

    def end(self, slots: SequenceSlots, count: int, *, begun: bool) -> None:
        """Record that `count` sequences ended; `begun` is True if these sequences had a first token."""
        self._change(slots, coming=0 if begun else -count, held=-count if begun else 0)

    def leave(self, slots: SequenceSlots) -> None:
        """Free all slots of a finished request."""
        self._change(slots, coming=-slots.coming, held=-slots.held)

    def _change(self, slots: SequenceSlots, *, coming: int, held: int) -> None:
        is_new = slots in self._coming and not slots.held
        slots.coming += coming
        slots.held += held
        self._num_held += held
        if not slots.coming:
            self._coming.pop(slots, None)
        self._num_new += (slots in self._coming and not slots.held) - is_new

    def _look(self) -> tuple[int, int]:
        """Return the number of waiting requests and the number of free slots for a new request."""
        most = self._num_slots()
        free = (_MANY if most is None else most) - self._num_held
        num_new = self._num_new
        for slots in self._coming:
            if min(slots.at_once, slots.coming) > free:
                return num_new, 0  # this request and all after it wait
            free -= slots.coming
            num_new -= not slots.held
        return 0, free
