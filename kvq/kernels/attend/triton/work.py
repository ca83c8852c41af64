"""Work list of Triton attention: the keys of each program, computed on the device from actual lengths.

The host knows the number of new tokens in a step, but not the lengths of contexts: a captured graph repeats
the same launches while they grow. The grid therefore depends only on the numbers of tiles and
multiprocessors, and one small kernel splits the keys into pieces of about equal size, largest first. Programs
past the end of the list return at once. `pieces` and `least_split` in kvq.kernels.gpu.shapes choose the
number of pieces.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvq.kernels.attend.options import Part
from kvq.kernels.attend.triton.list_kernel import ITEM_WORDS, MERGE_WORDS, OLD, YOUNG, list_kernel
from kvq.kernels.gpu.launch import launch
from kvq.kernels.paged import SequenceBatch

_NO_LAST = (1 << 31) - 1
_FEW, _BLOCK = 16, 256  # slots of tiles processed together, in small batches and in others


class Cut(NamedTuple):
    """Sizes that determine a work list, apart from the batch, for sequences of `fewest` to `most` rows."""

    share: int  # query heads of a KV head
    rows: int  # of a tile: (new token, query head of the KV head)
    keys: int  # of a tile
    fewest: int
    most: int
    window: int | None
    pieces: int  # into which the keys of one KV head are split, if there are enough
    least: int  # keys of a piece on average, a multiple of a tile's
    part: Part | None = None  # of the keys
    chunk: int | None = None
    fixed: int = 0  # keys of every piece but the first and last, at multiples of this; 0: by the load


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """Pieces of work per KV head. Sizes here are upper limits; the actual sizes are on the device."""

    items: Tensor  # int32 [pieces, ITEM_WORDS]: part -1 has all keys of its rows, others number results
    merged: Tensor | None  # int32 [tiles, MERGE_WORDS]: tiles in several parts; None if no tile can be
    parts: int
    height: int  # rows of the highest tile


def work_list(batch: SequenceBatch, cut: Cut) -> WorkList | None:
    """Return the work list, built once per batch; None if no sequence has that many query rows."""
    if cut not in batch.kept:
        batch.kept[cut] = _built(batch, cut)
    found: WorkList | None = batch.kept[cut]
    return found


def _built(batch: SequenceBatch, cut: Cut) -> WorkList | None:
    # Query rows, and how many sequences have that many.
    every = ((new * cut.share, count) for new, count in Counter(batch.own_lens).items())
    heights = [(height, count) for height, count in every if cut.fewest <= height <= cut.most]
    if not heights:
        return None
    tiles = sum(count * -(-height // cut.rows) for height, count in heights)
    lens = batch.device_lens()
    longest = max(batch.context_lens) if cut.fixed else _longest(batch, cut)
    can_split = longest > (cut.fixed or cut.least)
    parts = (tiles * (_longest(batch, cut) // cut.fixed + 2) if cut.fixed else cut.pieces) if can_split else 0
    sizes = (tiles + parts, ITEM_WORDS.value), (max(min(tiles, parts // 2), 1), MERGE_WORDS.value)
    items, merged = (torch.empty(size, dtype=torch.int32, device=lens.device) for size in sizes)
    sequences = len(batch.query_lens)
    slots = sum(batch.query_lens) * cut.share // cut.rows + sequences
    counts = sequences, (sequences - 1).bit_length(), slots, len(items), len(merged)
    limits = cut.fewest, cut.most, cut.window or 0, cut.pieces, cut.least // cut.keys
    part = part_numbers(cut.part)
    launch(
        list_kernel,
        (1, 1, 1),
        (lens, items, merged),
        (lens.stride(0), *counts, *limits, part["recent"], part["part_first"], part["part_last"]),
        {
            **{"SHARE": cut.share, "ROWS": cut.rows, "KEYS": cut.keys, "WINDOW": cut.window is not None},
            **{"CHUNK": cut.chunk or 0, "AGE": part["AGE"], "AGE_BLOCK": part["AGE_BLOCK"]},
            "FIXED": cut.fixed // cut.keys,
            **{"BLOCK": _FEW if slots <= _FEW else _BLOCK, "num_warps": 4},
        },
    )
    height = min(cut.rows, max(height for height, _ in heights))
    return WorkList(items, merged if can_split else None, parts, height)


def _longest(batch: SequenceBatch, cut: Cut) -> int:
    """Return an upper limit, known to the host, of the number of keys that a tile may have."""
    longest, part = max(batch.context_lens), cut.part
    if cut.window is not None:
        longest = min(longest, cut.window + cut.rows + cut.keys)
    if cut.chunk is not None:
        longest = min(longest, cut.chunk + cut.rows + cut.keys)
    if part is None:
        return longest
    if part.is_young:
        return min(longest, part.recent + part.block_size + cut.rows + cut.keys)
    return longest if part.last is None else min(longest, part.last)


def part_numbers(part: Part | None) -> dict[str, int]:
    """Return the kernel arguments that describe a part of the keys."""
    if part is None:
        return {"AGE": 0, "AGE_BLOCK": 1, "recent": 0, "part_first": 0, "part_last": _NO_LAST}
    age, last = YOUNG if part.is_young else OLD, _NO_LAST if part.last is None else part.last
    limits = {"recent": part.recent, "part_first": part.first, "part_last": last}
    return {"AGE": int(age.value), "AGE_BLOCK": part.block_size, **limits}
