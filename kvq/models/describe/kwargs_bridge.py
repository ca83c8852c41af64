"""Hooks that pass a step to kvq's attention through model code that was not written for steps.

They pass the step through layers that drop keyword arguments, and give the positions of a step's tokens to
attention that would otherwise derive them from a cache's length.
"""

import dis
import inspect
import threading
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

_STEP = "kvq_step"
_HOOKED = "kvq_hands_on"  # attribute of a layer that already has the hooks
_COUNTS = "get_seq_length"  # the cache's method from which attention derives positions


class _Given(threading.local):
    """Keyword arguments of the layer running in this thread."""

    step: Any = None


_given = _Given()


def hand_on_steps(model: nn.Module) -> None:  # D200: two hooks pass the step on
    """Make layers that drop keyword arguments pass on the step; repeated calls have no effect."""
    for layer in list(model.modules()):
        attention = [x for x in layer.children() if hasattr(x, "layer_idx") and _takes_keywords(x)]
        if (
            not attention
            or _hands_keywords_on(layer)
            or not _takes_keywords(layer)
            or hasattr(layer, _HOOKED)
        ):
            continue
        setattr(layer, _HOOKED, True)
        layer.register_forward_pre_hook(_remember, with_kwargs=True)
        layer.register_forward_hook(_forget, always_call=True)
        for module in attention:
            module.register_forward_pre_hook(_hand_on, with_kwargs=True)


def _takes_keywords(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and bool(code.co_flags & inspect.CO_VARKEYWORDS)


def _hands_keywords_on(module: nn.Module) -> bool:
    """Return True if the module's forward pass calls any function with `**keywords`."""
    steps = dis.get_instructions(inspect.unwrap(type(module).forward))
    return any(step.opname == "CALL_FUNCTION_EX" for step in steps)


def _remember(layer: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    _given.step = given.get(_STEP)


def _forget(*_: object) -> None:
    _given.step = None


def _hand_on(
    module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, given if _given.step is None else {_STEP: _given.step} | given


class _Unused(TypedDict, total=False):
    layer_idx: int
    cache_kwargs: dict[str, Any]


class _Before:
    """Stand-in for a cache that reports how many tokens precede the step's tokens."""

    def __init__(self, positions: Tensor) -> None:
        """`positions`: positions of the step's tokens, int64 [tokens]."""
        self._positions = positions

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Return int64 [tokens]: each token's position minus its index in the packed row."""
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def update(self, key: Tensor, value: Tensor, *_: object, **__: Unpack[_Unused]) -> tuple[Tensor, Tensor]:
        return key, value


def pass_positions(model: nn.Module) -> None:  # D206: a stand-in cache that counts positions
    """Pass a step's token positions to attention that would otherwise derive them from a cache."""
    for module in model.modules():
        code = getattr(type(module).forward, "__code__", None)
        if hasattr(module, "layer_idx") and code is not None and _COUNTS in code.co_names:
            module.register_forward_pre_hook(_with_positions, with_kwargs=True)


def _with_positions(
    module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positions = getattr(given.get("kvq_step"), "positions", None)
    return args, given if positions is None else given | {"past_key_values": _Before(positions)}
