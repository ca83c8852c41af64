"""Rotary angles of a step's tokens. `kvq.geometry.support` decides which RoPE types are accepted."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

_PAGE = 1024  # positions computed at a time
_MOST_BYTES = 32 << 20  # maximum size of the tables


class Angles:
    """Cosines and sines of a model's rotary module, for every kind of layer with separate angles.

    On a CPU, where the module's dozen operations take longer than the rotation of the heads, angles are
    looked up in tables. They depend only on the position and are bit-identical to the module's.
    """

    def __init__(self, rotary: Any, kinds: Collection[str]) -> None:
        """`kinds`: names as in `DecoderParts.angles`; "" if all layers share their angles."""
        self._rotary = rotary
        self._kinds = sorted(kinds)
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return cos and sin [rows, columns] in x's dtype; x: [1, rows, hidden], positions: [1, rows]."""
        tables = self._covering(x, int(positions.max()) + 1) if x.device.type == "cpu" else None
        if tables is None:
            return self._found(x, positions)
        rows = positions[0]
        return {
            kind: (cos.index_select(0, rows), sin.index_select(0, rows))
            for kind, (cos, sin) in tables.items()
        }

    def tables(self, dtype: torch.dtype, end: int) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Return cos and sin [positions, columns] of every kind, at least for all positions before `end`.

        For CPUs only. Returns the same dictionary until the tables grow, or None if they would be too large.
        """
        return self._covering(torch.empty(1, 1, 1, dtype=dtype, device="cpu"), end)

    def _found(self, x: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        found = {}
        for kind in self._kinds:
            cos, sin = self._rotary(x, positions, kind) if kind else self._rotary(x, positions)
            found[kind] = cos[0], sin[0]
        return found

    def _covering(self, x: Tensor, end: int) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Return tables in x's dtype for all positions before `end`, or None if they would be too large.

        All tables are replaced at once, since engines that share a model may run steps in separate threads.
        """
        tables = self._tables
        known = next((len(cos) for cos, _ in tables.values() if cos.dtype is x.dtype), 0)
        if end <= known:
            return tables
        pages = -(-max(end, min(2 * known, 16 * _PAGE)) // _PAGE)
        page = self._found(x, torch.arange(known, known + _PAGE)[None])
        row_bytes = sum(2 * cos.shape[-1] * cos.element_size() for cos, _ in page.values())
        if pages * _PAGE * row_bytes > _MOST_BYTES:
            return None
        parts = [tables] if known else []
        parts.append(page)
        for at in range(known + _PAGE, pages * _PAGE, _PAGE):
            parts.append(self._found(x, torch.arange(at, at + _PAGE)[None]))
        made = {
            kind: (torch.cat([part[kind][0] for part in parts]), torch.cat([part[kind][1] for part in parts]))
            for kind in self._kinds
        }
        self._tables = made
        return made
