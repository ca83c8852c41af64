"""Cold codec: rewrites blocks of a cache in formats of fewer bits, and back, with the kernels that exist."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvq.cache.kv_cache import KVCache
from kvq.cache.stores.base import PagedStore
from kvq.cache.stores.make import make_store
from kvq.kernels.paged import Rows
from kvq.layout import KVLayout, Role

AT_ONCE = 64  # blocks


class ColdCodec:
    """Codec between a cache's blocks and the same tokens in colder formats, the rungs.

    Rung 0 is the cache's own format. A block in the format of a rung is a uint8 tensor on the cache's device.
    """

    def __init__(
        self, cache: KVCache, own: KVLayout, rungs: Sequence[KVLayout], backend: str = "auto"
    ) -> None:
        """Allocate some blocks of every rung, to work in.

        `own`: layout of the cache's recipe. It and the layouts of `rungs` have no staging areas, so their
        layer groups are the first ones of the cache.

        Raises:
            OutOfMemory: they don't fit.
            UnsupportedKernel: no backend can run a format.
        """
        self._cache, self._device = cache, cache.pool(0).device
        self._rungs = [
            KVCache(rung, num_blocks=[AT_ONCE] * len(rung.groups), device=self._device, backend=backend)
            for rung in rungs
        ]
        self._layouts = [own, *rungs]
        sealed = {
            layer.geometry.index: make_store(
                *(own, layer, group.group.index),
                {Role.SEALED: cache.layer(layer.geometry.index)},
                *(self._device, backend),
            )
            for group in own.groups
            for layer in group.layers
        }
        self._stores = [sealed, *(rung.stores for rung in self._rungs)]

    def block_bytes(self, rung: int, group: int) -> int:
        """Return the bytes of a block in the format of a rung."""
        return self._layouts[rung].groups[group].block_bytes

    def encode(self, group: int, blocks: Sequence[int], rung: int) -> list[Tensor]:
        """Return blocks of the cache in the format of a rung."""
        some = [blocks[at : at + AT_ONCE] for at in range(0, len(blocks), AT_ONCE)]
        return [one for part in some for one in self._from_scratch(group, self._rows(0, group, part), rung)]

    def decode(self, group: int, contents: Sequence[Tensor], rung: int, blocks: Sequence[int]) -> None:
        """Write contents in the format of a rung to blocks of the cache."""
        for at in range(0, len(blocks), AT_ONCE):
            some = contents[at : at + AT_ONCE]
            self._to_scratch(group, some, rung)
            self._write(0, group, blocks[at : at + AT_ONCE], self._rows(rung, group, range(len(some))))

    def recode(self, group: int, contents: Sequence[Tensor], rung: int, colder: int) -> list[Tensor]:
        """Return contents in the format of another rung."""
        self._to_scratch(group, contents, rung)
        return self._from_scratch(group, self._rows(rung, group, range(len(contents))), colder)

    def _to_scratch(self, group: int, contents: Sequence[Tensor], rung: int) -> None:
        for at, content in enumerate(contents):
            self._rungs[rung - 1].write_block(group, at, content)

    def _from_scratch(self, group: int, rows: dict[int, Rows], rung: int) -> list[Tensor]:
        count = len(next(iter(rows.values()))[0])
        self._write(rung, group, range(count), rows)
        return [self._rungs[rung - 1].block_content(group, at) for at in range(count)]

    def _rows(self, rung: int, group: int, blocks: Sequence[int]) -> dict[int, Rows]:
        """Return K and V of blocks by layer, [blocks, kv_heads, block_size, dim] each."""
        tables = torch.tensor([[block] for block in blocks], dtype=torch.int32, device=self._device)
        size = self._layouts[0].block_size
        return {index: store.gather(tables, 0, size, unrotate=True) for index, store in self._of(rung, group)}

    def _write(self, rung: int, group: int, blocks: Sequence[int], rows: dict[int, Rows]) -> None:
        size, device = self._layouts[0].block_size, self._device
        first = torch.tensor(list(blocks), device=device)[:, None] * size
        slots = (first + torch.arange(size, device=device)).flatten()
        for index, store in self._of(rung, group):
            k, v = rows[index]
            if self._layouts[rung].recipe.is_staged:
                store.write_blocks(k, v, list(blocks))
            else:
                store.write(_by_token(k), _by_token(v), slots)

    def _of(self, rung: int, group: int) -> list[tuple[int, PagedStore]]:
        """Return the stores of a layer group's layers."""
        layers = self._layouts[rung].groups[group].layers
        return [(layer.geometry.index, self._stores[rung][layer.geometry.index]) for layer in layers]


def _by_token(rows: Tensor) -> Tensor:
    """Return [blocks, kv_heads, block_size, dim] as [tokens, kv_heads, dim]."""
    return rows.transpose(1, 2).flatten(0, 1)
