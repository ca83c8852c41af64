"""Validation errors of request bodies, under the client's field names; refusal of non-text content."""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

from pydantic_core import PydanticCustomError

from kvq.errors import nearest
from kvq.server.http.problems import Problem

_MAX_KEY = 60  # maximum length of a key in an error, in characters
_VALID = "Input should be a valid "
_OF_TYPE, _OF_WORDS = "_type", "literal_error"
_Placed = tuple[list[str], Any]  # a path in the body, and one of pydantic's errors
# Suffixes of error types that mean that the value may be of another type
_ELSE = (_OF_TYPE, _OF_WORDS, "missing")
_MAX_KIND = 20  # maximum length of a kind that is compared with known kinds
_ALIKE = 0.5  # so that input_text matches text, and image does not
_MEDIA = ("input_image", "input_file", "input_audio")  # which are alike input_text
_JSON: dict[type, str] = {
    str: "a text",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    dict: "an object",
    list: "a list",
    type(None): "null",
}


def of_body(errors: Sequence[Any], body: Any) -> Problem:  # D319: the most fitting of pydantic's errors
    """Return the problem to report for pydantic's errors in a body: the deepest error of the first field.

    For a field that may have one of several types, pydantic reports one error per type.
    """
    field = _path(errors[0], body)[:1]
    placed = ((_path(one, body), one) for one in errors)
    of_field = list(takewhile(lambda pair: pair[0][:1] == field, placed))
    # The type that the value fits best: first by the value's own type, then by the depth of the error
    path, found = max(
        _firsts(of_field), key=lambda at: (not at[1]["type"].endswith(_ELSE), len(at[1]["loc"]))
    )
    where, message = ".".join(path), _message(found, [one for at, one in of_field if at == path])
    text = f"{where or 'body'}: {message}{'' if ' got ' in message else _got(found)}"
    return Problem(400, text, code=found.get("ctx", {}).get("code"), param=where or None)


def content_of(noun: str, kinds: Sequence[str], others: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Return a "before" validator that accepts a text, or a list of `noun`s of the given kinds.

    `others`: kinds that are recognized, but refused because their content can't be expressed as text.

    The validator raises PydanticCustomError for any other value; `at` in its context is the list index.
    """
    known = " or ".join(map(repr, kinds))

    def check(given: Any) -> Any:
        if isinstance(given, list):
            for at, part in enumerate(given):  # up to a quarter of a million parts
                if not (isinstance(part, dict) and part.get("type") in kinds):
                    _refuse(part, at)
        elif given is not None and not isinstance(given, str):
            words = "this server reads text only; give a text or a list of {noun}s, got {got}"
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
            words = "this server reads text only, got {got}; leave it out or describe it in words"
            if kind not in _MEDIA and (hint := nearest(kind[:_MAX_KIND], kinds, cutoff=_ALIKE)):
                words = "{got} is not known{hint}"
            if kind in others:
                words = "{got} is of no use here, only {known}; leave it out"
        named = f"{'an' if noun == 'item' else 'a'} {noun}"
        context = {"noun": named, "known": known, "got": got, "at": at, "hint": hint}
        raise PydanticCustomError("content", words, context)

    return check


def refuse_tool(known: str) -> Callable[[type, Any], Any]:
    """Return a "before" validator that refuses tools of other types than `known`, the default."""

    def check(cls: type, tool: Any) -> Any:
        kind = tool.get("type", known) if isinstance(tool, dict) else known
        if kind != known:
            words = f"only {known} ones; leave it out, or run it yourself and offer it so"
            raise ValueError(f"tools of type {kind!r:.50} are not supported, {words}")
        return tool

    return check


def json_kind(value: Any) -> str:
    """Return a phrase that names the JSON type of a decoded value."""
    return _JSON.get(type(value), "something else")


def _firsts(placed: Iterable[_Placed]) -> Iterable[_Placed]:
    """Return the first error for each type that a field may have; `loc` contains types and path parts."""
    firsts: dict[tuple[Any, ...], _Placed] = {}
    for path, one in placed:
        place = one["loc"]
        types = [part for part in place if isinstance(part, str) and part[:_MAX_KEY] not in path]
        firsts.setdefault((len(place), *types), (path, one))
    return firsts.values()


def _message(found: Any, there: Sequence[Any]) -> str:
    """Return the message of an error; `there` contains all errors of the same value."""
    message: str = found["msg"].removeprefix("Value error, ")
    kinds = dict.fromkeys(one["msg"].removeprefix(_VALID) for one in there if one["msg"].startswith(_VALID))
    if not message.startswith(_VALID):
        return message
    *others, last = kinds
    return f"{_VALID}{', '.join(others)}{' or ' if others else ''}{last}"


def _got(error: Any) -> str:
    given, kind = error.get("input"), error["type"]
    if isinstance(given, bool):
        return f", got {given!s}".lower()
    if isinstance(given, int | float) or (kind == _OF_WORDS and isinstance(given, str)):
        return f", got {given!r:.50}"
    return f", got {json_kind(given)}" if kind.endswith((_OF_TYPE, _OF_WORDS)) else ""


def _path(error: Any, body: Any) -> list[str]:
    """Return the path of an error in the body, without the parts of `loc` that name a type."""
    path, value, parts = [], body, error["loc"]
    own = error.get("ctx", {}).get("at")  # one level deeper than pydantic's `loc`
    parts = (*parts[parts[:1] == ("body",) :], *(() if own is None else (own,)))
    for i, part in enumerate(parts, 1):
        is_missing = error["type"] == "missing" and i == len(parts)
        if isinstance(value, dict) and (part in value or is_missing):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        path.append(f"{part!s:.{_MAX_KEY}}")
    return path
