"""The names that metrics go by: kvq's own, and those that people's dashboards know."""

from collections.abc import Iterable

from kvq.errors import ConfigError, nearest
from kvq.server.names.common import Names, Source
from kvq.server.names.kvq import KvqNames
from kvq.server.names.llm import LlmNames
from kvq.server.names.vllm import VllmNames

__all__ = ["ALL_NAMES", "Names", "Source", "make_names", "parse_names"]

_KINDS: dict[str, type[Names]] = {"kvq": KvqNames, "vllm": VllmNames, "llm": LlmNames}
ALL_NAMES = tuple(_KINDS)


def parse_names(given: Iterable[str]) -> tuple[str, ...]:
    """Kinds of names from options, each a kind or several with commas; `kvq` is always there.

    Raises:
        ConfigError: no such kind.
    """
    asked = {"kvq"} | {part.strip() for text in given for part in text.split(",") if part.strip()}
    for name in sorted(asked - set(_KINDS)):
        raise ConfigError(
            f"metrics go by the names of {', '.join(ALL_NAMES)}, got {name!r}{nearest(name, list(ALL_NAMES))}"
        )
    return tuple(name for name in ALL_NAMES if name in asked)


def make_names(kind: str, source: Source) -> Names:
    """The metrics under one kind of names."""
    return _KINDS[kind](source)
