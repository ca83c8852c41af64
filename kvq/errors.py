"""Error classes of kvq, in one hierarchy.

Every message states the value received, the values allowed, and how to fix the error.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class KVQError(Exception):
    """Base class of every error that kvq raises for its users."""


class ConfigError(KVQError, ValueError):
    """Option, format name or recipe that can't be used."""


class UnfitFormat(ConfigError):
    """KV format that doesn't fit a model's head dimensions. Other formats may fit."""


class BrokenFormat(ConfigError):
    """KV format that breaks the model according to the load check. An option can accept it anyway."""


class ModelError(KVQError):
    """Model that is missing, damaged, or of a kind that kvq would run incorrectly."""


class RequestError(KVQError, ValueError):
    """Request that can't be served; other requests continue."""


class Overloaded(RequestError):
    """Request that can't be served now because of earlier requests. It may be sent again later."""


class NumericalError(RequestError):
    """Request whose K, V or logits contained NaN or infinity. Only this request ends; nothing is cached."""


class DamagedData(KVQError, ValueError):
    """Stored KV that is damaged, or was written for another model or format. It must be computed again."""


class EngineError(KVQError):
    """Failure of the engine, or a request's failure that the request itself did not cause."""


class OutOfBlocks(KVQError):
    """Too few free blocks in a pool. Nothing was allocated."""


class OutOfMemory(KVQError):
    """Too little free memory on the device. Nothing was allocated."""


class UnsupportedKernel(KVQError):
    """Operation for which no backend can run on this device. The message lists every reason."""


@contextmanager
def explained(kind: type[KVQError], what: str) -> Iterator[None]:
    """Raise a `kind` with `what` and the system's reason in place of an OSError inside the block."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error


def first_lines(error: BaseException, limit: int = 300) -> str:
    """Return another library's error message, shortened to one line, or the error's type if it has none."""
    text = " ".join(str(error).split())
    if not text or isinstance(error, KeyError):
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= limit else text[: limit - 3] + "..."


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """Return an error message: `unknown {what} 'x'; did you mean 'y'? known: y, z`."""
    names = list(known)
    return f"unknown {what} {name!r}{nearest(str(name), names) or ';'} known: {', '.join(names)}"


def not_one_of(what: str, name: object, allowed: Iterable[str]) -> str:
    """Return an error message: `{what} must be one of y, z, got 'x'; did you mean 'y'?`."""
    names = list(allowed)
    return f"{what} must be one of {', '.join(names)}, got {name!r}{nearest(str(name), names)}"


def nearest(name: str, allowed: Iterable[str], *, cutoff: float = 0.4) -> str:
    """Return `; did you mean 'x'?` for the closest allowed name, or an empty string.

    `cutoff`: minimum similarity, from 0 to 1.
    """
    import difflib

    close = difflib.get_close_matches(name.lower(), allowed, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""
