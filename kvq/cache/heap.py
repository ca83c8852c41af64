"""Memory release: returns freed memory to the system, even in processes without torch."""

import ctypes


def give_back() -> bool:
    """Return freed memory to the system. Return False if the C library can't (musl, macOS)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return False
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    trim(0)
    return True
