"""The kernel that builds the work list of a step; see work.py.

Tiles are assigned slots without a prefix sum: the tiles of sequence i begin at slot (query rows of earlier
sequences) // ROWS + i. No two tiles share a slot, and searching the first tokens finds a slot's sequence.
"""

import triton
import triton.language as tl

# Of an item: sequence (-1: none), first row, first token, new tokens, context, first tile of keys, end, part.
ITEM_WORDS = tl.constexpr(8)
# Of a tile in several parts: parts (0: no tile), first part, first row, first token, new tokens.
MERGE_WORDS = tl.constexpr(5)
_CLASSES = tl.constexpr(16)  # of sizes, by which pieces are ordered
OLD, YOUNG = tl.constexpr(1), tl.constexpr(2)  # keys that are seen, of a part; 0: keys of any age


@triton.jit
def edge(position, recent, AGE_BLOCK: tl.constexpr):
    """Return the first key that is young for a query at `position`; see Part."""
    return tl.maximum(position + 1 - recent, 0) // AGE_BLOCK * AGE_BLOCK


@triton.jit
def lowest_key(  # D137: bounds from positions on the device: graphs hold
    position, window, recent, part_first, WINDOW: tl.constexpr, CHUNK: tl.constexpr, AGE: tl.constexpr,
    AGE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the first key that a query at `position` sees."""
    lowest = position * 0
    if WINDOW:
        lowest = tl.maximum(position - window + 1, 0)
    if CHUNK > 0:
        lowest = tl.maximum(lowest, position // CHUNK * CHUNK)
    if AGE == OLD:
        lowest = tl.maximum(lowest, part_first)
    elif AGE == YOUNG:
        lowest = tl.maximum(lowest, edge(position, recent, AGE_BLOCK))
    return lowest


@triton.jit
def highest_key(position, recent, part_last, AGE: tl.constexpr, AGE_BLOCK: tl.constexpr):
    """Return the last key that a query at `position` sees, or -1 if there is none."""
    highest = position
    if AGE == OLD:
        highest = tl.minimum(edge(position, recent, AGE_BLOCK), part_last) - 1
    return highest


@triton.jit
def _tiles(
    slot, step, SHARE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, AGE: tl.constexpr, AGE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the tiles in some slots: sequence, row, first token, new tokens, context, first tile of keys,
    end of the keys, and number of tiles of keys, which is -1 if a slot has no tile."""
    lens_ptr, lens_row, sequences, search_bits, fewest, most, window, recent, part_first, part_last = step
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
    highest = highest_key(context - new + last // SHARE, recent, part_last, AGE, AGE_BLOCK)
    end = highest + 1
    lowest = lowest_key(
        context - new + row // SHARE, window, recent, part_first, WINDOW, CHUNK, AGE, AGE_BLOCK
    )  # fmt: skip
    begin = lowest // KEYS
    is_tile = (row < rows) & (rows >= fewest) & (rows <= most)
    keys = (tl.maximum(end - begin * KEYS, 0) + KEYS - 1) // KEYS
    return sequence, row, first, new, context, begin, end, tl.where(is_tile, keys, -1)


@triton.jit
def _pieces(keys, begin, before, total, pieces, FIXED: tl.constexpr):
    """Return the number of parts of each tile, 0 for a slot without one; the size class of its parts, largest
    first (bool [slots, _CLASSES]); and the number of parts in each class (int32 [slots, _CLASSES]).

    `pieces` are distributed over tiles by their share of all keys, `total`; tiles in earlier slots have
    `before` keys. Rounding remainders carry over to the next tile, so there are no more parts in total.
    With FIXED, parts end at multiples of so many tiles of keys.
    """
    whole = tl.maximum(keys, 0)
    if FIXED > 0:
        dealt = (begin + whole - 1) // FIXED - begin // FIXED + 1
    else:
        upto = before + tl.cumsum(whole.to(tl.int64), axis=0)
        dealt = (upto * pieces + total // 2) // total - ((upto - whole) * pieces + total // 2) // total
    parts = tl.where(keys < 0, 0, tl.maximum(dealt, 1)).to(tl.int32)
    size = whole // tl.maximum(parts, 1)  # for a split tile, less than twice the average of a piece
    rank = tl.maximum(-(size * pieces * (_CLASSES // 2) // total) + (_CLASSES - 1), 0)
    own = rank[:, None] == tl.arange(0, _CLASSES)[None, :]
    return parts, own, tl.where(own, parts[:, None], 0)


@triton.jit
def _store_items(
    items, at, parts, first_part, sequence, row, first, new, context, begin, end, keys,
    KEYS: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Store the items of several tiles, whose keys are divided into parts of complete key tiles, evenly or at
    multiples of FIXED."""
    for part in range(0, tl.max(parts, axis=0)):
        there = part < parts
        item = items + (at + part) * ITEM_WORDS
        if FIXED > 0:
            start = tl.maximum(begin, (begin // FIXED + part) * FIXED)
            stop = (begin // FIXED + part + 1) * FIXED
        else:
            divisor = tl.maximum(parts, 1)
            start, stop = begin + keys * part // divisor, begin + keys * (part + 1) // divisor
        stop = tl.minimum(stop * KEYS, end)
        number = tl.where(parts > 1, first_part + part, -1)
        words = (sequence, row, first, new, context, start, stop, number)
        for i in tl.static_range(ITEM_WORDS):
            tl.store(item + i, words[i], mask=there)


@triton.jit
def _fill(words, begin, end, value, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Mark the records [begin, end) as empty."""
    for done in range(begin, end, BLOCK):
        at = done + tl.arange(0, BLOCK)
        tl.store(words + at * WORDS, tl.zeros((BLOCK,), tl.int32) + value, mask=at < end)


_COUNTS = [
    *("lens_row", "sequences", "search_bits", "slots", "num_items", "num_merged"),
    *("fewest", "most", "window", "pieces", "least"),
    *("recent", "part_first", "part_last"),
]


@triton.jit(do_not_specialize=_COUNTS)
def list_kernel(
    lens_ptr, items_ptr, merged_ptr, lens_row, sequences, search_bits, slots, num_items, num_merged,
    fewest, most, window, pieces, least, recent, part_first, part_last,
    SHARE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    AGE: tl.constexpr, AGE_BLOCK: tl.constexpr, FIXED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Split the keys of all tiles into `pieces`, or into fewer pieces of at least `least` key tiles each; a
    smaller tile is one piece. With FIXED, split them at multiples of so many tiles, whatever the batch. Grid:
    one program, as lists are short and each entry depends on earlier ones."""
    step = (
        lens_ptr, lens_row, sequences, search_bits, fewest, most, window, recent, part_first, part_last
    )  # fmt: skip
    total = tl.zeros((1,), tl.int64)
    for done in range(0, slots, BLOCK):
        keys = _tiles(done + tl.arange(0, BLOCK), step, SHARE, ROWS, KEYS, WINDOW, CHUNK, AGE, AGE_BLOCK)[7]
        total += tl.sum(tl.maximum(keys, 0).to(tl.int64), axis=0)
    total = tl.maximum(total, 1)
    wanted = tl.maximum(tl.minimum(total // least, pieces), 1)

    counts = tl.zeros((_CLASSES,), tl.int32)
    work = tl.zeros((1,), tl.int64)
    for done in range(0, slots, BLOCK):
        tiles = _tiles(done + tl.arange(0, BLOCK), step, SHARE, ROWS, KEYS, WINDOW, CHUNK, AGE, AGE_BLOCK)
        keys = tiles[7]
        _, _, found = _pieces(keys, tiles[5], work, total, wanted, FIXED)
        counts += tl.sum(found, axis=0)
        work += tl.sum(tl.maximum(keys, 0).to(tl.int64), axis=0)

    starts = tl.cumsum(counts, axis=0) - counts  # of every class among the items
    num_parts, num_split = tl.zeros((1,), tl.int32), tl.zeros((1,), tl.int32)
    work = tl.zeros((1,), tl.int64)
    for done in range(0, slots, BLOCK):
        sequence, row, first, new, context, begin, end, keys = _tiles(
            done + tl.arange(0, BLOCK), step, SHARE, ROWS, KEYS, WINDOW, CHUNK, AGE, AGE_BLOCK
        )
        if FIXED > 0:  # a tile has no rows of later tokens, even if its program has room for them
            seen = tl.minimum((row + ROWS) // SHARE, new)
            context += seen - new
            new = seen
        parts, own, found = _pieces(keys, begin, work, total, wanted, FIXED)
        before = starts[None, :] + tl.cumsum(found, axis=0) - found
        at = tl.sum(tl.where(own, before, 0), axis=1)
        is_split = (parts > 1).to(tl.int32)
        kept = parts * is_split
        first_part = num_parts + tl.cumsum(kept, axis=0) - kept
        _store_items(
            items_ptr,
            at,
            parts,
            first_part,
            sequence,
            row,
            first,
            new,
            context,
            begin,
            end,
            keys,
            KEYS,
            FIXED,
        )
        merged = merged_ptr + (num_split + tl.cumsum(is_split, axis=0) - is_split) * MERGE_WORDS
        words = (parts, first_part, row, first, new)
        for i in tl.static_range(MERGE_WORDS):
            tl.store(merged + i, words[i], mask=parts > 1)
        starts += tl.sum(found, axis=0)
        num_parts += tl.sum(kept, axis=0)
        num_split += tl.sum(is_split, axis=0)
        work += tl.sum(tl.maximum(keys, 0).to(tl.int64), axis=0)
    _fill(items_ptr, tl.sum(counts, axis=0), num_items, -1, ITEM_WORDS, BLOCK)
    _fill(merged_ptr, tl.max(num_split, axis=0), num_merged, 0, MERGE_WORDS, BLOCK)
