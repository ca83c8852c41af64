"""Out-of-memory errors: detection of libraries' messages, and a check before a library ends the process."""

import errno
import mmap
import re
import resource

from kvq.errors import OutOfMemory, first_lines
from kvq.sizes import binary

# D363: OpenBLAS ends the process unless 1.25 GiB are free
_ADDRESSES = 5 << 28  # bytes that the libraries need, mostly for code; with less, some libraries hang
_SIGNS = re.compile(
    r"(can't|cannot|failed to|unable to) (allocate|mmap|map segment|start new thread|create thread)"
    r"|(not enough|out of) memory|bad_alloc",
    re.IGNORECASE,
)
# Consequences of unnoticed allocation failures, in torch's signature parser and in C modules
_INDIRECT_SIGNS = re.compile(
    "unknown parameter type|could not create a primitive|without (an exception|exception) set"
    "|returned NULL without"
)


def check_addresses() -> None:
    """Check whether the address space is large enough to load the libraries.

    Raises:
        OutOfMemory: `ulimit -v` is too low.
    """
    limit = address_limit()
    if limit is None:
        return
    try:
        mmap.mmap(-1, _ADDRESSES, mmap.MAP_PRIVATE).close()
    except (OSError, MemoryError) as error:
        raise OutOfMemory(
            f"memory is short: the process may have {binary(limit)} of addresses, and the libraries "
            f"alone take {binary(_ADDRESSES)}; raise `ulimit -v`"
        ) from error


def memory_message(error: BaseException) -> str | None:
    """Return a message for an error caused by insufficient memory, or None for any other error."""
    limit = address_limit()
    for one in _chain(error):
        if _is_memory_error(one) or (limit is not None and _INDIRECT_SIGNS.search(str(one))):
            remedy = "take a smaller model, context or block pool"
            if limit is not None:
                remedy = f"raise `ulimit -v`, which gives it {binary(limit)}, or {remedy}"
            return f"memory is short: {first_lines(one)}; {remedy}"
    return None


def address_limit() -> int | None:
    """Return this process's address space limit in bytes (`ulimit -v`), or None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _is_memory_error(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, ImportError | RuntimeError | OSError) and bool(_SIGNS.search(str(error)))


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
