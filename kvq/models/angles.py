"""By how much a step's heads are turned."""

from collections.abc import Collection
from typing import Any

from torch import Tensor


class Angles:
    """cos and sin of a model's rotary module, of every kind of layer that has its own."""

    def __init__(self, rotary: Any, kinds: Collection[str]) -> None:
        """`kinds`: as DecoderParts name them; "" where all layers share some."""
        self._rotary = rotary
        self._kinds = sorted(kinds)

    def __call__(self, x: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """cos, sin [rows, columns] of x's dtype; x: [1, rows, hidden], positions: [1, rows]."""
        found = {}
        for kind in self._kinds:
            cos, sin = self._rotary(x, positions, kind) if kind else self._rotary(x, positions)
            found[kind] = cos[0], sin[0]
        return found
