"""Errors of kvq, in one tree.

Every message states what was given, what is allowed and how to fix it.
"""


class KVQError(Exception):
    """Base of every error that kvq raises for its users."""


class ConfigError(KVQError, ValueError):
    """Option, format name or recipe that can't be used as given."""


class UnfitFormat(ConfigError):
    """KV format that doesn't fit a model's head dimensions; other formats may."""


class BrokenFormat(ConfigError):
    """KV format that breaks the model, as the load check found. An option can accept it anyway."""


class ModelError(KVQError):
    """Model that is missing, damaged, or of a kind that kvq would run incorrectly."""


class RequestError(KVQError, ValueError):
    """Request that can't be served; other requests continue."""


class Overloaded(RequestError):
    """Request that can't be served now because of earlier requests; it may be sent again later."""


class NumericalError(RequestError):
    """Request whose K, V or logits contained NaN or infinity. Only it has ended; nothing of it is cached."""


class DamagedData(KVQError, ValueError):
    """Stored KV that is damaged, or was written for another model or format. Compute it again."""


class EngineError(KVQError):
    """Failure of a request or of the engine that the request itself did not cause."""


class OutOfBlocks(KVQError):
    """Too few free blocks in a pool. Nothing was allocated."""


class OutOfMemory(KVQError):
    """Too little free memory on the device. Nothing was allocated."""


class UnsupportedKernel(KVQError):
    """Operation for which this device has no backend; the message lists every reason."""


def first_lines(error: BaseException, limit: int = 300) -> str:
    """Return another library's error as one shortened line, with its type's name if the text is empty."""
    text = " ".join(str(error).split())
    if not text or isinstance(error, KeyError):
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= limit else text[: limit - 3] + "..."


def nearest(name: str, allowed: list[str], *, cutoff: float = 0.4) -> str:
    """Return `; did you mean 'x'?` for the closest allowed name, or an empty string.

    `cutoff`: the required similarity, from 0 to 1.
    """
    import difflib

    close = difflib.get_close_matches(name.lower(), allowed, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""
