"""Memory of this process that was freed; asked by processes without torch, too."""

import ctypes


def give_back() -> bool:
    """Give memory that was freed back to the system; False where the C library can't: musl, macOS."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return False
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    trim(0)
    return True
