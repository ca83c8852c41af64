"""Unquantized rows of every sequence's last tokens: recent tokens, and tokens of incomplete blocks.

`BatchRows._write_filled` in rows.py quantizes a block once it is full and followed by enough recent tokens.
"""

import torch
from torch import Tensor

from kvq.cache.memory import allocate_bytes
from kvq.kernels.paged import Rows


class RecentRows:  # D24: a dense tail instead of a staging area
    """Unquantized K and V of each layer's last tokens; tokens of incomplete blocks are stored only here."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # tokens per row
        self._layers: dict[int, _Tail] = {}

    @property
    def nbytes(self) -> int:
        return sum(tail.k.nbytes + tail.v.nbytes for tail in self._layers.values())

    def clear(self) -> None:
        self._layers.clear()

    def take(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a step's rows, and return the unquantized rows up to and including the step's rows.

        `k`, `v`: [batch, kv_heads, count, dim]. Returns the previously held rows followed by the step's rows,
        [batch, kv_heads, count + up to `limit`, dim], valid until the layer's next step.
        """
        if layer not in self._layers:
            self._layers[layer] = _Tail(k, v, self.limit)
        return self._layers[layer].push(k, v, self.limit)

    def truncate(self, count: int) -> None:
        """Drop the last `count` tokens. Earlier tokens stay if they are held."""
        for tail in self._layers.values():
            tail.held = max(0, tail.held - count)
            tail.end -= min(tail.end, count)

    @property
    def held(self) -> int:
        """Number of last tokens that all layers still hold."""
        return min((tail.held for tail in self._layers.values()), default=0)

    def rows(self, layer: int, count: int) -> Rows:
        """Return a copy of a layer's last `count` rows. Rows that are not held are zero."""
        tail = self._layers[layer]
        have = [x[:, :, tail.end - tail.held : tail.end] for x in (tail.k, tail.v)]
        k, v = (torch.nn.functional.pad(x[:, :, -count:], (0, 0, max(0, count - tail.held), 0)) for x in have)
        return k, v

    def refill(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Set a layer's last rows, [batch, kv_heads, at most `limit`, dim]."""
        tail = self._layers[layer]
        tail.held = tail.end = k.shape[2]
        tail.k[:, :, : tail.end], tail.v[:, :, : tail.end] = k, v

    @torch.inference_mode(False)
    def select(self, indices: Tensor) -> None:
        """Replace each row i with the former row `indices[i]`."""
        for tail in self._layers.values():
            tail.k, tail.v = tail.k[indices], tail.v[indices]


def _rows_of(x: Tensor, room: int) -> Tensor:
    """Return zeros [batch, kv_heads, room, dim] for rows with the dtype and device of `x`."""
    shape = torch.Size((*x.shape[:2], room, x.shape[3]))
    nbytes = shape.numel() * x.element_size()
    memory = allocate_bytes(nbytes, x.device, purpose="KvqCache's recent tokens")
    return memory.view(x.dtype).view(shape)


class _Tail:
    """One layer's recent rows: the last `held` rows before position `end` in two buffers.

    The buffers have room for a quarter more rows than `limit`, so that rows seldom have to be moved.
    """

    @torch.inference_mode(False)
    def __init__(self, k: Tensor, v: Tensor, limit: int) -> None:
        """Make empty buffers for rows like `k` and `v`, outside inference mode so that any mode can write."""
        room = limit + -(-limit // 4)
        self.k, self.v = (_rows_of(x, room) for x in (k, v))
        self.held = self.end = 0

    def push(self, k: Tensor, v: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        count, room = k.shape[2], self.k.shape[2]
        if self.held + count > room:
            exact = [torch.cat((old, new), dim=2) for old, new in zip(self._rows(), (k, v), strict=True)]
            self.held = self.end = min(limit, self.held + count)
            for rows, all_of_them in zip((self.k, self.v), exact, strict=True):
                rows[:, :, : self.end] = all_of_them[:, :, -self.end :]
            return exact[0], exact[1]
        if self.end + count > room:
            for rows in (self.k, self.v):
                rows[:, :, : self.held] = rows[:, :, self.end - self.held : self.end].clone()
            self.end = self.held
        self.k[:, :, self.end : self.end + count] = k
        self.v[:, :, self.end : self.end + count] = v
        self.end += count
        self.held += count
        exact_k, exact_v = self._rows()
        self.held = min(self.held, limit)
        return exact_k, exact_v

    def _rows(self) -> tuple[Tensor, Tensor]:
        held = slice(self.end - self.held, self.end)
        return self.k[:, :, held], self.v[:, :, held]


def put_over(dense: Tensor, exact: Tensor) -> None:
    """Overwrite the last dequantized rows with exact rows [batch, kv_heads, some, dim]."""
    some = min(exact.shape[2], dense.shape[2])
    dense[:, :, dense.shape[2] - some :] = exact[:, :, exact.shape[2] - some :]
