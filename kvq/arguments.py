"""Type checks for public functions: compares arguments with annotations, so that errors name the argument."""

import functools
import inspect
import numbers
import types
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from kvq.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
_SHOWN = 60  # characters of a value that a message shows
_NUMBERS: Mapping[Any, Any] = types.MappingProxyType({int: numbers.Integral, float: numbers.Real})


def checked(function: Callable[P, R]) -> Callable[P, R]:  # D374: 60 lines: others coerce, copy or reword
    """Return the function, wrapped so that it refuses arguments whose types don't match its annotations.

    Raises:
        ConfigError: an argument has the wrong type; the message names the argument.
    """
    signature = inspect.signature(function)
    hints: dict[str, Any] = {}  # filled at the first call, when all names in annotations can be resolved

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        hints.update(hints or _hints(function, signature))
        for name, value in (signature.bind(*args, **kwargs).arguments | kwargs).items():
            if name in hints:
                _check(f"{function.__name__}: {name}", value, hints[name])
        return function(*args, **kwargs)

    return call


def _hints(function: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """Return type hints by argument. `**options: Unpack[...]` is expanded into individual keywords."""
    found = get_type_hints(function)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            found.pop(name, None)
        elif parameter.kind is parameter.VAR_KEYWORD:
            for keywords in get_args(found.pop(name, None)):
                found |= get_type_hints(keywords)
    return found


def _check(name: str, value: object, hint: Any) -> None:
    if not fits(value, hint):
        raise ConfigError(f"{name} must be {_spelled(hint)}, got {type(value).__name__} {value!r:.{_SHOWN}}")


def fits(value: object, hint: Any) -> bool:
    """Return True if a value matches a type hint. Checks classes, unions and items of sequences."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is not None:
        if not isinstance(origin, type):
            return True
        if isinstance(value, str | bytes):
            return False
        if isinstance(value, list | tuple) and issubclass(list, origin) and len(inner) == 1:
            return all(fits(one, inner[0]) for one in value)
        return isinstance(value, origin)
    if hint is None or hint is type(None):
        return value is None
    if not isinstance(hint, type):
        return True
    if isinstance(value, bool):
        return hint in (bool, object)
    return isinstance(value, _NUMBERS.get(hint, hint))  # numpy's numbers pass, too


def _spelled(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_spelled, get_args(hint)))
    if hint is type(None):
        return "None"
    return getattr(hint, "__name__", str(hint)) if get_origin(hint) is None else str(hint)
