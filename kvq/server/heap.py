"""Memory that the C library keeps after it was freed, given back to the system."""

import ctypes
from collections.abc import Callable
from time import monotonic

_EVERY_S = 30.0


class Heap:
    """Gives back what nobody uses, now and then.

    A prompt's activations are freed and cut up for smaller things; glibc then keeps most of their pages. On
    the mixed load of benchmarks/reliability.py that was 49 of 75 MB gained in the first minute. Giving them
    back takes 0.3 to 2 ms.
    """

    def __init__(self, every_s: float = _EVERY_S) -> None:
        self._every_s = every_s
        self._trim = _malloc_trim()
        self._trimmed_s = monotonic()

    def tend(self) -> bool:
        """Give memory back if it is time to; True if this was done."""
        now = monotonic()
        if self._trim is None or now - self._trimmed_s < self._every_s:
            return False
        self._trimmed_s = now
        self._trim(0)
        return True


def _malloc_trim() -> Callable[[int], int] | None:
    """None where the C library has no such thing: musl, macOS."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
