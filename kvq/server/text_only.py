"""Content that no model here can read is refused in words: these models read text."""

from collections.abc import Callable, Sequence
from typing import Any

from pydantic_core import PydanticCustomError

from kvq.errors import nearest

_MAX_KIND = 20  # characters of one that is compared with those that are known
_ALIKE = 0.5  # as input_text and text are, and image and text are not
_JSON: dict[type, str] = {
    str: "a text",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    dict: "an object",
    list: "a list",
    type(None): "null",
}


def content_of(noun: str, kinds: Sequence[str], others: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Before content is looked at: it is a text, or a list of `noun`s of these kinds.

    `others` are kinds of no content that could be described; they are only said to be of no use.

    The check raises PydanticCustomError: it is something else; `at` in its context is the place in the list.
    """
    known = " or ".join(map(repr, kinds))

    def check(given: Any) -> Any:
        if isinstance(given, list):
            for at, part in enumerate(given):  # there may be a quarter of a million
                if not (isinstance(part, dict) and part.get("type") in kinds):
                    _refuse(part, at)
        elif given is not None and not isinstance(given, str):
            words = "this model reads text only; give a text or a list of {noun}s, got {got}"
            raise PydanticCustomError("content", words, {"noun": noun, "got": json_kind(given)})
        return given

    def _refuse(part: Any, at: int) -> None:
        kind, hint = part.get("type") if isinstance(part, dict) else None, ""
        if not isinstance(kind, str):
            words = "{noun} is an object whose type is {known}, got {got}"
            got = json_kind(part)
            if isinstance(part, dict):
                got = "an object without a type" if kind is None else f"{json_kind(kind)} for the type"
        else:
            got = f"{'an' if kind[:1] in 'aeiou' else 'a'} {kind!r:.50} {noun}"
            words = "this model reads text only, got {got}; leave it out or describe it in words"
            if hint := nearest(kind[:_MAX_KIND], list(kinds), cutoff=_ALIKE):
                words = "{got} is not known{hint}"
            if kind in others:
                words = "{got} is of no use here, only {known}; leave it out"
        context = {"noun": f"a {noun}", "known": known, "got": got, "at": at, "hint": hint}
        raise PydanticCustomError("content", words, context)

    return check


def json_kind(value: Any) -> str:
    """What a decoded value is, in words."""
    return _JSON.get(type(value), "something else")
