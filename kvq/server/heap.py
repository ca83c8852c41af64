"""Memory that the C library keeps after it was freed, given back to the system."""

from time import monotonic

from kvq.cache.memory import give_back

_EVERY_S = 30.0


class Heap:
    """Gives back what nobody uses, now and then.

    A prompt's activations are freed and cut up for smaller things; glibc then keeps most of their pages. On
    the mixed load of benchmarks/reliability.py that was 49 of 75 MB gained in the first minute. Giving them
    back takes 0.3 to 2 ms.
    """

    def __init__(self, every_s: float = _EVERY_S) -> None:
        self._every_s = every_s
        self._trimmed_s = monotonic()
        self._is_used = False

    @property
    def left_s(self) -> float | None:
        """Seconds until it is time to; None: nothing was done since the last time."""
        return max(0.0, self._trimmed_s + self._every_s - monotonic()) if self._is_used else None

    def tend(self) -> bool:
        """Give memory back if it is time to; True if this was done. Called after whatever was done."""
        now = monotonic()
        self._is_used = now - self._trimmed_s < self._every_s
        if self._is_used:
            return False
        self._trimmed_s = now
        return give_back()
