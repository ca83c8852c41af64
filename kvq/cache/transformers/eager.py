"""Eager functions: bookkeeping that `torch.compile` must leave alone, since its numbers change each step."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Let compiled code break its graph here and call the function as it is, with all that it calls.

    `torch.compiler.disable` would do it, but importing what that needs takes seconds; so it waits for the
    first call out of compiled code.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            if function not in _DISABLED:
                _DISABLED[function] = torch.compiler.disable(function)
            return _DISABLED[function](*args, **kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call


# torch.compile can't see through functools.cache.
_DISABLED: dict[Callable[..., Any], Callable[..., Any]] = {}
