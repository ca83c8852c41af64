"""Which keys each program of Triton attention takes: a list that the device builds from real lengths.

The host knows how many new tokens a step has, but not how long contexts are: a captured graph repeats the
same launches while they grow. So the grid follows from the number of tiles and of multiprocessors, and one
small kernel cuts the keys into pieces of about equal size, largest first. Programs behind the list's end
return at once.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels.paged import SequenceBatch

# Of an item: sequence (-1: no item), first row, first token, new tokens, context, first tile of keys, end, part.
ITEM_WORDS = tl.constexpr(8)
# Of a tile in several parts: parts (0: no tile), first part, first row, first token, new tokens.
MERGE_WORDS = tl.constexpr(5)
_CLASSES = tl.constexpr(16)  # of sizes, by which pieces are ordered
_BLOCK = 256  # tiles looked at together


class Cut(NamedTuple):
    """What a list depends on beside the batch. Only sequences of `fewest` to `most` query rows are in it."""

    share: int  # query heads of a KV head
    rows: int  # of a tile: (new token, query head of the KV head)
    keys: int  # of a tile
    fewest: int
    most: int
    window: int | None
    skip_last: int
    pieces: int  # that the keys of one KV head are cut into at most, beside one for every tile
    least: int  # keys of a piece, a multiple of a tile's


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """Pieces of work for every KV head. Sizes are upper limits; what a step has lies on the device."""

    items: Tensor  # int32 [pieces, ITEM_WORDS]: part -1 is all that its rows see, others number results
    merged: Tensor | None  # int32 [tiles, MERGE_WORDS]: those in several parts; None if no tile can be
    parts: int
    height: int  # rows of the highest tile


def work_list(batch: SequenceBatch, cut: Cut) -> WorkList | None:
    """Launch the kernel that builds the list, once a batch; None if no sequence is so high."""
    if cut not in batch.kept:
        batch.kept[cut] = _built(batch, cut)
    found: WorkList | None = batch.kept[cut]
    return found


def _built(batch: SequenceBatch, cut: Cut) -> WorkList | None:
    heights = list(_heights(batch, cut))
    if not heights:
        return None
    tiles = sum(count * -(-height // cut.rows) for height, count in heights)
    lens = batch.device_lens()
    splits = min(tiles, cut.pieces) if _longest(batch, cut) > cut.least else 0
    sizes = (tiles + min(splits, 1) * cut.pieces, ITEM_WORDS), (max(splits, 1), MERGE_WORDS)
    items, merged = (torch.empty(size, dtype=torch.int32, device=lens.device) for size in sizes)
    sequences = len(batch.query_lens)
    list_kernel[(1,)](
        lens,
        items,
        merged,
        lens_row=lens.stride(0),
        sequences=sequences,
        search_bits=(sequences - 1).bit_length(),
        slots=sum(batch.query_lens) * cut.share // cut.rows + sequences,
        num_items=len(items),
        num_merged=len(merged),
        fewest=cut.fewest,
        most=cut.most,
        window=cut.window or 0,
        skip_last=cut.skip_last,
        pieces=cut.pieces,
        least=cut.least // cut.keys,
        SHARE=cut.share,
        ROWS=cut.rows,
        KEYS=cut.keys,
        WINDOW=cut.window is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    height = min(cut.rows, max(height for height, _ in heights))
    return WorkList(items, merged if splits else None, cut.pieces + splits if splits else 0, height)


def _heights(batch: SequenceBatch, cut: Cut) -> Iterator[tuple[int, int]]:
    """Query rows, and how many sequences have that many."""
    for new, count in Counter(batch.query_lens).items():
        if cut.fewest <= new * cut.share <= cut.most:
            yield new * cut.share, count


def _longest(batch: SequenceBatch, cut: Cut) -> int:
    """Keys that a tile may have at most, as far as the host knows."""
    longest = max(batch.context_lens)
    return longest if cut.window is None else min(longest, cut.window + cut.rows + cut.keys)


@triton.jit
def _tiles(
    slot, lens_ptr, lens_row, sequences, search_bits, fewest, most, window, skip_last,
    SHARE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The tiles in some slots: sequence, row, first token, new tokens, context, first tile of keys, end,
    tiles of keys; the last is -1 where a slot holds none.

    Sequence i's tiles begin at slot (rows before it) // ROWS + i: no two share a slot, and where they
    begin is known without adding up how many tiles those before it have.
    """
    sequence = slot * 0
    for i in range(0, search_bits):
        probe = sequence + (1 << (search_bits - 1 - i))
        first = tl.load(lens_ptr + probe, mask=probe < sequences, other=0)
        begins = first * SHARE // ROWS + probe
        sequence = tl.where((probe < sequences) & (begins <= slot), probe, sequence)
    first = tl.load(lens_ptr + sequence)
    new = tl.load(lens_ptr + lens_row + sequence)
    context = tl.load(lens_ptr + 2 * lens_row + sequence)
    row = (slot - first * SHARE // ROWS - sequence) * ROWS
    rows = new * SHARE
    last = tl.minimum(row + ROWS, rows) - 1
    end = tl.minimum(context - new + last // SHARE + 1, context - skip_last)
    begin = slot * 0
    if WINDOW:
        begin = tl.maximum(context - new + row // SHARE - window + 1, 0) // KEYS
    is_tile = (row < rows) & (rows >= fewest) & (rows <= most)
    keys = (tl.maximum(end - begin * KEYS, 0) + KEYS - 1) // KEYS
    return sequence, row, first, new, context, begin, end, tl.where(is_tile, keys, -1)


@triton.jit
def _pieces(keys, split):
    """Parts of tiles, 0 where there is no tile, and per class of size, largest first, how many:
    int32 [slots, _CLASSES]."""
    parts = tl.where(keys < 0, 0, tl.maximum((keys + split - 1) // split, 1))
    size = (tl.maximum(keys, 0) + tl.maximum(parts, 1) - 1) // tl.maximum(parts, 1)
    rank = _CLASSES - 1 - size * (_CLASSES - 1) // split
    own = rank[:, None] == tl.arange(0, _CLASSES)[None, :]
    return parts, own, tl.where(own, parts[:, None], 0)


@triton.jit
def _store_items(
    items, at, parts, first_part, sequence, row, first, new, context, begin, end, keys, KEYS: tl.constexpr
):
    """The items of some tiles, whose keys are shared out evenly in whole tiles."""
    for part in range(0, tl.max(parts, axis=0)):
        there = part < parts
        item = items + (at + part) * ITEM_WORDS
        divisor = tl.maximum(parts, 1)
        stop = tl.minimum((begin + keys * (part + 1) // divisor) * KEYS, end)
        tl.store(item, sequence, mask=there)
        tl.store(item + 1, row, mask=there)
        tl.store(item + 2, first, mask=there)
        tl.store(item + 3, new, mask=there)
        tl.store(item + 4, context, mask=there)
        tl.store(item + 5, begin + keys * part // divisor, mask=there)
        tl.store(item + 6, stop, mask=there)
        tl.store(item + 7, tl.where(parts > 1, first_part + part, -1), mask=there)


@triton.jit
def _fill(words, begin, end, value, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Say of the records from `begin` to `end` that they hold nothing."""
    for done in range(begin, end, BLOCK):
        at = done + tl.arange(0, BLOCK)
        tl.store(words + at * WORDS, tl.zeros((BLOCK,), tl.int32) + value, mask=at < end)


_COUNTS = [
    *("lens_row", "sequences", "search_bits", "slots", "num_items", "num_merged"),
    *("fewest", "most", "window", "skip_last", "pieces", "least"),
]


@triton.jit(do_not_specialize=_COUNTS)
def list_kernel(
    lens_ptr, items_ptr, merged_ptr, lens_row, sequences, search_bits, slots, num_items, num_merged,
    fewest, most, window, skip_last, pieces, least,
    SHARE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cut the keys of all tiles into pieces of at most 1 / `pieces` of them, but at least `least` tiles of
    keys. One program: the lists are short, and every place in them depends on what comes before.
    """
    work = tl.zeros((1,), tl.int64)
    for done in range(0, slots, BLOCK):
        _, _, _, _, _, _, _, keys = _tiles(
            done + tl.arange(0, BLOCK), lens_ptr, lens_row, sequences, search_bits, fewest, most, window,
            skip_last, SHARE, ROWS, KEYS, WINDOW,
        )  # fmt: skip
        work += tl.sum(tl.maximum(keys, 0).to(tl.int64), axis=0)
    split = tl.maximum((tl.max(work, axis=0) + pieces - 1) // pieces, least).to(tl.int32)

    counts = tl.zeros((_CLASSES,), tl.int32)
    for done in range(0, slots, BLOCK):
        _, _, _, _, _, _, _, keys = _tiles(
            done + tl.arange(0, BLOCK), lens_ptr, lens_row, sequences, search_bits, fewest, most, window,
            skip_last, SHARE, ROWS, KEYS, WINDOW,
        )  # fmt: skip
        _, _, found = _pieces(keys, split)
        counts += tl.sum(found, axis=0)

    starts = tl.cumsum(counts, axis=0) - counts  # of every class among the items
    num_parts, num_split = tl.zeros((1,), tl.int32), tl.zeros((1,), tl.int32)
    for done in range(0, slots, BLOCK):
        sequence, row, first, new, context, begin, end, keys = _tiles(
            done + tl.arange(0, BLOCK), lens_ptr, lens_row, sequences, search_bits, fewest, most, window,
            skip_last, SHARE, ROWS, KEYS, WINDOW,
        )  # fmt: skip
        parts, own, found = _pieces(keys, split)
        before = starts[None, :] + tl.cumsum(found, axis=0) - found
        at = tl.sum(tl.where(own, before, 0), axis=1)
        is_split = (parts > 1).to(tl.int32)
        kept = parts * is_split
        first_part = num_parts + tl.cumsum(kept, axis=0) - kept
        _store_items(
            items_ptr, at, parts, first_part, sequence, row, first, new, context, begin, end, keys, KEYS
        )
        merged = merged_ptr + (num_split + tl.cumsum(is_split, axis=0) - is_split) * MERGE_WORDS
        tl.store(merged, parts, mask=parts > 1)
        tl.store(merged + 1, first_part, mask=parts > 1)
        tl.store(merged + 2, row, mask=parts > 1)
        tl.store(merged + 3, first, mask=parts > 1)
        tl.store(merged + 4, new, mask=parts > 1)
        starts += tl.sum(found, axis=0)
        num_parts += tl.sum(kept, axis=0)
        num_split += tl.sum(is_split, axis=0)
    _fill(items_ptr, tl.sum(counts, axis=0), num_items, -1, ITEM_WORDS, BLOCK)
    _fill(merged_ptr, tl.max(num_split, axis=0), num_merged, 0, MERGE_WORDS, BLOCK)
