"""Positions for attention that counts them by the length of a cache: in a step each token has its own."""

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

_COUNTS = "get_seq_length"  # the method of a cache that it calls


class _Unused(TypedDict, total=False):
    layer_idx: int
    cache_kwargs: dict[str, Any]


class _Before:
    """The tokens before a step's, as such code asks a cache for them."""

    def __init__(self, positions: Tensor) -> None:
        """`positions`: int64 [tokens]."""
        self._positions = positions

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """int64 [tokens]: a token's position, less its place in the row."""
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def update(self, key: Tensor, value: Tensor, *_: object, **__: Unpack[_Unused]) -> tuple[Tensor, Tensor]:
        return key, value


def pass_positions(model: nn.Module) -> None:  # D206: code that counts by a cache gets one that counts
    """Give a model's attention the positions of a step's tokens wherever it would count them by a cache."""
    for module in model.modules():
        code = getattr(type(module).forward, "__code__", None)
        if hasattr(module, "layer_idx") and code is not None and _COUNTS in code.co_names:
            module.register_forward_pre_hook(_with_positions, with_kwargs=True)


def _with_positions(
    module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positions = getattr(given.get("kvq_step"), "positions", None)
    return args, given if positions is None else given | {"past_key_values": _Before(positions)}
