"""The one tree of errors that kvq raises on purpose.

Every message says what was given, what is allowed and what to do about it.
"""


class KVQError(Exception):
    """Base of every error that kvq raises for its users."""


class ConfigError(KVQError, ValueError):
    """An option, a format name or a recipe that can't be used as given."""


class UnfitFormat(ConfigError):
    """A KV format that a model's head dimensions don't fit; others may."""


class BrokenFormat(ConfigError):
    """A KV format that breaks the model it was asked for, as the load check found. It may be accepted."""


class ModelError(KVQError):
    """A model that is missing, damaged, or of a kind that kvq would run wrongly."""


class RequestError(KVQError, ValueError):
    """One request that can't be served; others go on."""


class Overloaded(RequestError):
    """A request that can't be served now, for what others asked before; it may be sent again later."""


class NumericalError(RequestError):
    """A request whose K, V or logits held NaN or infinity. It alone ended; nothing of it is cached."""


class DamagedData(KVQError, ValueError):
    """Stored KV that is not what was written, or was written for something else. Compute it again."""


class EngineError(KVQError):
    """A request or an engine that failed for a reason that is not the request's own fault."""


class OutOfBlocks(KVQError):
    """A pool has fewer free blocks than were asked for. Nothing was taken."""


class OutOfMemory(KVQError):
    """The device has less free memory than the pools need. Nothing was allocated."""


class UnsupportedKernel(KVQError):
    """No backend can run an operation on this device; the message lists every reason."""


def first_lines(error: BaseException, limit: int = 300) -> str:
    """Return a foreign error's text on one line, shortened; its type's name where it says nothing."""
    text = " ".join(str(error).split())
    if not text or isinstance(error, KeyError):
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= limit else text[: limit - 3] + "..."


def nearest(name: str, allowed: list[str], *, cutoff: float = 0.4) -> str:
    """Return `; did you mean 'x'?` for the closest allowed name, or an empty string.

    `cutoff`: how alike they have to be, from 0 to 1.
    """
    import difflib

    close = difflib.get_close_matches(name.lower(), allowed, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""
