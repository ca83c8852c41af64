"""`seal` in C++ for CPUs."""

from collections.abc import Iterator
from ctypes import c_int64
from typing import Any

import torch
from torch import Tensor

from kvq.kernels.native.abi import layer_of
from kvq.kernels.native.library import run
from kvq.kernels.paged import StagedBatch, StagedKV


def seal(kv: StagedKV, batch: StagedBatch) -> None:
    """Do what the reference does, byte for byte; see reference.py.

    Raises:
        IndexError: a table is too short or names a block outside its pool; nothing was written.
    """
    moves, count = moves_of(kv, batch)
    if count:
        sinks = None if kv.sinks is None else layer_of(kv.sinks)
        layers = layer_of(kv.recent), layer_of(kv.sealed), sinks
        run("seal", *layers, moves, count, torch.get_num_threads())


def moves_of(kv: StagedKV, batch: StagedBatch) -> tuple[Any, int]:
    """Return the blocks that a step seals, as the kernel's int64 [count, 3] array, and their number.

    Raises:
        IndexError: a table is too short.
    """
    kept, name = batch.recent.kept, (seal, kv.exact)  # all layers of a group seal the same blocks
    if name not in kept:
        moves = {move[1:]: move for move in _moves(kv, batch)}  # each shared block once
        numbers = [number for move in moves.values() for number in move]
        kept[name] = (c_int64 * len(numbers))(*numbers), len(moves)
    found: tuple[Any, int] = kept[name]
    return found


def _moves(kv: StagedKV, batch: StagedBatch) -> Iterator[tuple[int, int, bool]]:
    """Yield source, target, and whether the target is a block of sinks, for every block to be sealed."""
    size = kv.sealed.block_size
    sinks = kv.exact.sinks // size  # blocks
    for i, found in enumerate(batch.recent.sealing(kv.exact.recent, size)):
        if not found:
            continue
        sources = _entries(batch.recent.tables, i, found)
        first = range(found.start, max(found.start, min(found.stop, sinks)))
        if first:
            assert batch.sinks is not None, "a layer with sinks has their tables"
            for source, target in zip(sources, _entries(batch.sinks.tables, i, first), strict=False):
                yield source, target, True
        rest = range(first.stop, found.stop)
        targets = _entries(batch.sealed.tables, i, rest)
        for source, target in zip(sources[len(first) :], targets, strict=True):
            yield source, target, False


def _entries(tables: Tensor, sequence: int, blocks: range) -> list[int]:
    if blocks.stop > tables.shape[1]:
        raise IndexError("a table or a slot names a block outside the pool: it is shorter than its sequence")
    entries: list[int] = tables[sequence, blocks.start : blocks.stop].tolist()
    return entries
