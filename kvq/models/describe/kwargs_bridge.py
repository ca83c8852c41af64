"""Layers that don't hand keywords on to their attention, which kvq's needs one of: the step."""

import dis
import inspect
import threading
from typing import Any

from torch import nn

_STEP = "kvq_step"
_HOOKED = "kvq_hands_on"  # attribute of a layer that does by now


class _Given(threading.local):
    """Keywords of the layer that runs in this thread."""

    step: Any = None


_given = _Given()


def hand_on_steps(model: nn.Module) -> None:  # D200: two hooks hand the step on
    """Have such layers hand on a step that they are given; doing it again changes nothing."""
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
    """True if its forward pass calls anything with `**keywords`."""
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
