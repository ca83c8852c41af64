"""The last tokens of every row as they came, beside their quantized blocks."""

import torch
from torch import Tensor


class RecentRows:
    """K and V of each layer's last tokens, unquantized, in rings that position p enters at p % limit.

    Attention looks at recent tokens most, so a few of them exact save much of what 4 bits cost. The
    blocks hold these tokens too: dropping a ring loses precision, never tokens.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit  # tokens per row
        self._rings: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> [batch, kv_heads, limit, dim] each
        self._ends: dict[int, int] = {}  # layer -> position after its last token
        self._held: dict[int, int] = {}  # layer -> tokens in its ring

    @property
    def nbytes(self) -> int:
        """Bytes of all rings."""
        return sum(k.nbytes + v.nbytes for k, v in self._rings.values())

    def clear(self) -> None:
        """Forget all tokens."""
        self._rings.clear()
        self._ends.clear()
        self._held.clear()

    def restore(self, layer: int, k: Tensor, v: Tensor, new: tuple[Tensor, Tensor]) -> None:
        """Put exact rows over the last ones of `k` and `v`, and remember the newest.

        `k`, `v`: [batch, kv_heads, tokens, dim], dequantized, up to the step's last token. `new`: the
        step's own rows, [batch, kv_heads, count, dim]; all of them go over theirs.
        """
        count = new[0].shape[2]
        held = min(self._held.get(layer, 0), k.shape[2] - count)
        end = self._ends.get(layer, 0)
        if layer not in self._rings:
            self._rings[layer] = self._empty(new[0]), self._empty(new[1])
        for dense, ring, fresh in zip((k, v), self._rings[layer], new, strict=True):
            for at, where in self._pieces(end - held, end):
                offset = dense.shape[2] - count - end + at
                dense[:, :, offset : offset + where.stop - where.start] = ring[:, :, where]
            dense[:, :, dense.shape[2] - count :] = fresh
            first = max(0, count - self.limit)
            for at, where in self._pieces(end + first, end + count):
                ring[:, :, where] = fresh[:, :, at - end : at - end + where.stop - where.start]
        self._ends[layer] = end + count
        self._held[layer] = min(self.limit, self._held.get(layer, 0) + count)

    def truncate(self, count: int) -> None:
        """Drop the last `count` tokens; those before them stay exact as far as they are held."""
        for layer, held in self._held.items():
            self._ends[layer] -= count
            self._held[layer] = max(0, held - count)

    @torch.inference_mode(False)
    def select(self, indices: Tensor) -> None:
        """Make row i what row `indices[i]` was."""
        self._rings = {x: (k[indices], v[indices]) for x, (k, v) in self._rings.items()}

    @torch.inference_mode(False)
    def _empty(self, new: Tensor) -> Tensor:
        """A ring for rows such as `new`. Made during inference, it could not be written outside it."""
        batch, heads, _, dim = new.shape
        return torch.zeros(batch, heads, self.limit, dim, dtype=new.dtype, device=new.device)

    def _pieces(self, start: int, end: int) -> list[tuple[int, slice]]:
        """The positions [start, end) as (first position, place in the ring), one or two of them."""
        pieces = []
        while start < end:
            place = start % self.limit
            size = min(end - start, self.limit - place)
            pieces.append((start, slice(place, place + size)))
            start += size
        return pieces
