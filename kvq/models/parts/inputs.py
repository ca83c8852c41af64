"""Checks of a model's inputs: texts that can be tokenized, and sequences of token ids."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Set

from kvq.errors import RequestError


def check_token_ids(given: object, wanted: str) -> None:
    """Check that `given` contains only integer token ids. `wanted` is the start of the error message.

    Raises:
        RequestError: `given` is not a list, or contains anything else, such as booleans.
    """
    check_holds_items(given, wanted)
    if isinstance(given, str):
        raise RequestError(f"{wanted}, got a text; tokenize it first")
    if isinstance(given, Iterator):
        raise RequestError(f"{wanted}, got {type(given).__name__}; make a list of it")
    assert isinstance(given, Iterable), "it was checked"
    if isinstance(given, array) and given.typecode in "bB":
        raise RequestError(f"{wanted}, got an array of bytes")
    if "bool" in str(getattr(given, "dtype", "")):
        raise RequestError(f"{wanted}, got an array of truth values")
    kinds = {kind.__name__: hasattr(kind, "__index__") for kind in set(map(type, given))}
    if wrong := sorted(name for name, is_whole in kinds.items() if name in ("bool", "bool_") or not is_whole):
        raise RequestError(f"{wanted}, got a list with {', '.join(wrong)} in it")


def check_holds_items(given: object, wanted: str) -> None:
    """Raise RequestError unless `given` is an ordered iterable. `wanted` is the start of the message."""
    is_one = getattr(given, "shape", None) == ()  # an array of no dimension
    wrong = isinstance(given, bytes | bytearray | memoryview | Mapping | Set)
    if is_one or wrong or not isinstance(given, Iterable):
        raise RequestError(f"{wanted}, got {type(given).__name__}")


def check_unicode(text: str, what: str) -> None:
    """Raise RequestError if `text` contains lone surrogates, which result from bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} is not valid Unicode at character {error.start}; give UTF-8 text"
        ) from error
