"""Staged recipes in benchmarks: tokens are written and sealed as in steps, with rings for recent tokens."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvq.bench.kernels.workload import Workload, slots_of
from kvq.cache import KVCache
from kvq.cache.stores.staged import StagedStore
from kvq.errors import ConfigError
from kvq.kernels import StagedBatch
from kvq.kernels.attend.options import Part
from kvq.kernels.paged import PagedRows
from kvq.layout import KVLayout

_CHUNK = 512  # tokens written at a time


def filled_staged(workload: Workload, kv: str) -> tuple[KVCache, StagedBatch, int]:
    """Return a filled cache of a staged recipe, the step that reads the cache, and the number of layers.

    Raises:
        ConfigError: there is more than one new token per sequence, each with different recent keys.
    """
    if workload.new > 1:
        raise ConfigError(f"{kv} is staged, which is timed in decode only; leave out --new {workload.new}")
    layout, needs, size = workload.layout(kv), workload.blocks(), workload.block_size
    exact, count = layout.exact, len(needs)
    ring, first = -(-(_CHUNK + exact.recent) // size) + 2, exact.sinks // size
    blocks = [sum(needs), count * ring, count * first][: len(layout.groups)]
    cache = KVCache(layout, num_blocks=blocks, device=workload.device, backend=workload.backend)
    sequence = torch.arange(count, device=workload.device)[:, None]
    index = torch.arange(max(needs), device=workload.device)
    recent = (sequence * ring + index % ring).int()
    sinks = torch.where(index < first, sequence * first + index, 0).int() if first else None
    batch = StagedBatch(
        sealed=workload.step(workload.shuffled_tables()),
        recent=workload.step(recent),
        sinks=None if sinks is None else workload.step(sinks),
    )
    layers = range(len(layout.geometry.layers))
    for i, position, k, v in workload.random_rows(_CHUNK):
        slots, end = slots_of(recent[i], position, size), int(position[-1]) + 1
        one = _of_sequence(batch, i, len(position), end)
        for layer in layers:
            store = _staged(cache, layer)
            store.write(k, v, slots)
            store.seal(one)
    return cache, batch, len(layers)


def steps_of_staged(workload: Workload, kv: str) -> dict[str, Workload]:
    """Return the steps to time, keyed by the names of their rows.

    In "kvq", contexts have the workload's lengths, or one token less if the new token would seal a block. In
    "kvq, sealing a block each", contexts are up to a block shorter, so the new token seals a block of every
    sequence, which normally happens once in `block_size` steps.
    """
    recent, size = workload.layout(kv).exact.recent, workload.block_size
    late = [(n - recent) % size for n in workload.contexts]  # number of tokens since the last sealed block
    quiet = tuple(max(1, n - (over == 0)) for n, over in zip(workload.contexts, late, strict=True))
    steps = {"kvq": replace(workload, contexts=quiet)}
    sealing = tuple(n - over for n, over in zip(workload.contexts, late, strict=True))
    if min(sealing) >= recent + size:
        steps["kvq, sealing a block each"] = replace(workload, contexts=sealing)
    return steps


def _of_sequence(batch: StagedBatch, i: int, new: int, end: int) -> StagedBatch:
    """Return the step that adds `new` tokens to sequence `i`, up to length `end`."""
    parts = {
        name: part and replace(part, query_lens=(new,), context_lens=(end,), tables=part.tables[i : i + 1])
        for name in ("sealed", "recent", "sinks")
        for part in [getattr(batch, name)]
    }
    return StagedBatch(**parts)


def _staged(cache: KVCache, layer: int) -> StagedStore:
    store = cache.stores[layer]
    assert isinstance(store, StagedStore), "of a staged recipe without centers"
    return store


def visible_kv(cache: KVCache, batch: StagedBatch) -> tuple[Tensor, Tensor]:
    """Return the K and V visible to the last sequence's query, fp32 [1, kv_heads, tokens, dim] each."""
    kv, last = _staged(cache, 0).kv, batch.sealed.context_lens[-1]
    rows = cache.gather(0, batch.sealed.tables[-1:], 0, last, unrotate=True)
    first, edge = _old(cache.layout, last)
    plain = partial(_plain, size=kv.sealed.block_size)
    for own, name in zip(rows, ("k", "v"), strict=True):
        own[:, :, edge:] = plain(getattr(kv.recent, name), batch.recent.tables[-1], edge, last)
        if kv.sinks is not None and batch.sinks is not None:
            own[:, :, :first] = plain(getattr(kv.sinks, name), batch.sinks.tables[-1], 0, first)
    return rows


def read_bytes(layout: KVLayout, context: int) -> float:
    """Return the bytes read by one query in all layers, with only sealed tokens quantized."""
    first, edge = _old(layout, context)
    plain = layout.staging_of(0).block_bytes / layout.block_size
    return layout.kv_bytes_per_token * (edge - first) + plain * (context - edge + first)


def _old(layout: KVLayout, context: int) -> tuple[int, int]:
    """Return the range (first, end) of tokens that are quantized for the last of `context` tokens."""
    exact = layout.exact
    edge = Part(is_young=True, recent=exact.recent, block_size=layout.block_size).edge(context - 1)
    return min(exact.sinks, edge), edge


def _plain(rows: PagedRows, table: Tensor, start: int, end: int, size: int) -> Tensor:
    """Return the unquantized rows of positions `start` to `end` - 1, [kv_heads, tokens, dim]."""
    position = torch.arange(start, end, device=table.device)
    return rows.codes[table[position // size].long(), :, position % size].transpose(0, 1).float()
