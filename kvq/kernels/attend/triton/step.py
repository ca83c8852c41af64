"""Attention launches of one step: splitting the work, buffers for partial results, and the merge.

The plan is created once for a layer's blocks and reused in every step. Per-step data is created once for all
layers with the same split.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvq.kernels.attend.gathered import chosen
from kvq.kernels.attend.options import AttentionOptions, Part
from kvq.kernels.attend.triton.list_kernel import ITEM_WORDS, MERGE_WORDS, OLD, YOUNG, list_kernel
from kvq.kernels.attend.triton.results import merge_kernel
from kvq.kernels.gpu.launch import Bound, Rows, launch
from kvq.kernels.gpu.shapes import TileShape, changes, folded_keys, least_split, pieces
from kvq.kernels.paged import PagedKV, SequenceBatch, StagedKV

_NO_LAST = (1 << 31) - 1
_FEW, _BLOCK = 16, 256  # slots of tiles processed together, in small batches and in others


class _Cut(NamedTuple):
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
class _WorkList:
    """Pieces of work per KV head. Sizes here are upper limits; the actual sizes are on the device."""

    items: Tensor  # int32 [pieces, ITEM_WORDS]: part -1 has all keys of its rows, others number results
    merged: Tensor | None  # int32 [tiles, MERGE_WORDS]: tiles in several parts; None if no tile can be
    parts: int
    height: int  # rows of the highest tile


def work_list(batch: SequenceBatch, cut: _Cut) -> _WorkList | None:
    """Return the work list, built once per batch; None if no sequence has that many query rows."""
    if cut not in batch.kept:
        batch.kept[cut] = _built(batch, cut)
    found: _WorkList | None = batch.kept[cut]
    return found


def _built(batch: SequenceBatch, cut: _Cut) -> _WorkList | None:
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
    return _WorkList(items, merged if can_split else None, parts, height)


def _longest(batch: SequenceBatch, cut: _Cut) -> int:
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


_MERGED_TOGETHER = 16  # rows of parts that a program of the merge reads together
_MERGED_ROWS = 1, 4  # of the result per program, for decode tiles and for extend tiles
_ATTENDED = (
    *("q_ptr", "out_ptr", "lse_ptr", "parts_ptr", "part_lses_ptr"),
    *("items_ptr", "tables_ptr", "sink_ptr"),
)
# Of kernels that add means before and after their loop, and that read blocks of several forms.
_ROOM = "room_ptr", "recent_tables_ptr", "sinks_tables_ptr"
_MERGED = "parts_ptr", "part_lses_ptr", "out_ptr", "lse_ptr", "merged_ptr", "sink_ptr"
_NUMBERS = "q_token", "q_head", "q_dim", "table_stride", "height"
_FIXED_PIECE = 2048  # D396: keys of a piece if pieces may not depend on the batch; a multiple of every tile's
_MANY = (1 << 31) - 1  # query rows: no limit
_Result = tuple[Tensor, Tensor]
_Shapes = tuple[TileShape, TileShape]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """A layer's launches, without the data that changes from step to step."""

    name: tuple[Any, ...]  # key of the split of a step's work: layers with the same key share their lists
    shapes: tuple[TileShape, TileShape]  # of decode tiles, and of extend tiles
    options: AttentionOptions
    share: int  # query heads of a KV head
    kv_heads: int
    most_decode: int  # maximum number of query rows of a sequence and KV head in decode tiles
    may_gather: bool
    v_dim: int
    v_pad: int
    attend: tuple[Bound, Bound]
    room: int | None  # numbers per query row and block that means need; None: the kernel has no means
    merge: tuple[Bound, Bound]
    lse_words: int  # numbers stored with each row of a part

    @classmethod
    def of(
        cls, kernel: Any, fixed: Sequence[Mapping[str, Any]], shapes: _Shapes, options: AttentionOptions,
        *, most_decode: int, may_gather: bool,
    ) -> "Plan":  # fmt: skip
        """Make a plan. `kernel`: starts with the arguments that all kernels have; `fixed`: other arguments of
        the kernel and the merge, without tile sizes, for decode and for extend."""
        attends = (
            {x: _argument(value) for x, value in own.items() if x in kernel.arg_names}
            | {"ROWS": shape.rows, "KEYS": shape.keys, "FOLDED": folded_keys(shape), **shape.options()}
            for own, shape in zip(fixed, shapes, strict=True)
        )
        v: Rows = fixed[0]["v"]
        merged = {"V_DIM": v.dim, "V_PAD": v.pad, "V_ROTATED": v.rotated}
        merged |= {x: fixed[0][x] for x in ("Q_HEADS", "SHARE", "SINKS")}
        merged["MIXED"] = fixed[0].get("near") is not None and v.rotated > 1
        merges = (
            {**merged, "ROWS": n, "AT_ONCE": _MERGED_TOGETHER // n, "num_warps": 4} for n in _MERGED_ROWS
        )
        room = None
        tensors: tuple[str, ...] = _ATTENDED
        numbers: tuple[str, ...] = _NUMBERS
        if _ROOM[0] in kernel.arg_names:
            room = fixed[0]["APART"] and 1 + fixed[0]["BLOCK_SIZE"] // shapes[0].keys
            tensors, numbers = (*_ATTENDED, *_ROOM), (*_NUMBERS, "recent_stride", "sinks_stride")
        decode, extend = (Bound(kernel, tensors, numbers, own) for own in attends)
        one, more = (Bound(merge_kernel, _MERGED, ("height",), own) for own in merges)
        share, words = fixed[0]["SHARE"], 1 + merged["MIXED"]
        sizes = {"share": share, "kv_heads": fixed[0]["Q_HEADS"] // share, "v_pad": v.pad, "lse_words": words}
        sizes |= {"most_decode": most_decode, "may_gather": may_gather and not options.exact}
        seen = options.window, options.chunk, options.part, options.exact
        return cls(
            name=(*seen, *sizes.values(), *astuple(shapes[0]), *astuple(shapes[1])),
            **{"shapes": shapes, "options": options.without_sinks(), "v_dim": v.dim, "room": room, **sizes},
            attend=(decode, extend),
            merge=(one, more),
        )


def _argument(value: Any) -> Any:
    if isinstance(value, Rows):
        return value.argument(constant_slots=True)
    return type(value)(*map(_argument, value)) if hasattr(value, "_fields") else value


def options_of_layer(options: AttentionOptions, q_heads: int, kv_heads: int) -> dict[str, Any]:
    """Return the kernel arguments that are determined by a layer's options and heads."""
    flags = {x.upper(): getattr(options, x) is not None for x in ("sinks", "window", "softcap")}
    numbers = {"scale": options.scale, "softcap": options.softcap or 1.0, "window": options.window or 0}
    heads = {"Q_HEADS": q_heads, "SHARE": q_heads // kv_heads, "CHUNK": options.chunk or 0}
    return {**heads, **flags, **numbers, **part_numbers(options.part)}


_Planned = Callable[[Tensor, Any, AttentionOptions], Plan]


def plan_of(planned: _Planned, q: Tensor, kv: PagedKV | StagedKV, options: AttentionOptions) -> Plan:
    """Return the plan that `planned` makes, computed once for a layer's blocks and cached with them."""
    name = (
        *(planned, q.dtype, q.shape[1], changes()),
        *(options.scale, options.window, options.softcap, options.sinks is None, options.part, options.chunk),
        options.exact,
    )
    found: Plan | None = kv.kept.get(name)
    if found is None:
        found = kv.kept[name] = planned(q, kv, options)
    return found


def launched(
    plan: Plan, q: Tensor, batch: SequenceBatch, sinks: Tensor | None, near: Sequence[SequenceBatch] = ()
) -> tuple[tuple[Tensor, Tensor], list[int]]:
    """Launch the work of a step; return out, lse, and the sequences left to `attend_gathered`. `near`: as
    recent blocks and sinks see the batch, if there are any."""
    tokens, q_heads, _ = q.shape
    out = q.new_empty((tokens, q_heads, plan.v_dim))
    lse = q.new_empty((tokens, q_heads), dtype=torch.float32)
    step = _step(batch, plan)
    for work in step.works:
        _launch(plan, work, q, (batch, *(near or (batch, batch))), (out, lse), sinks)
    return (out, lse), step.gathered


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """Tiles of a step that have the same height, and buffers for the parts of split tiles."""

    items: _WorkList
    is_extend: bool
    parts: Tensor  # fp32 [parts, kv_heads, height, V_PAD]; layers run one after another and share it
    lses: Tensor  # fp32 [parts, kv_heads, height, numbers]
    grid: tuple[int, int, int]
    merge_grid: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """Sequences of a step, grouped by the kernel that handles them."""

    works: list[_Work]
    gathered: list[int]


def _step(batch: SequenceBatch, plan: Plan) -> _Step:
    """Return a batch's tiles and gathered sequences, computed once for all layers with the same split."""
    if plan.name not in batch.kept:
        seen = (x for x in (plan.options.window, plan.options.chunk) if x is not None)
        heads = plan.share * plan.kv_heads
        gathered = chosen(batch, heads, plan.share, min(seen, default=None)) if plan.may_gather else []
        batch.kept[plan.name] = _Step(list(_works(batch.without(gathered), plan)), gathered)
    found: _Step = batch.kept[plan.name]
    return found


def _works(batch: SequenceBatch, plan: Plan) -> Iterator[_Work]:
    exact, most_decode = plan.options.exact, plan.most_decode
    limits = [(1, _MANY)] if exact else [(1, most_decode), (most_decode + 1, _MANY)]
    for is_extend, (shape, (fewest, most)) in enumerate(zip(plan.shapes, limits, strict=False)):
        count = pieces(shape, plan.kv_heads, batch.tables.device)
        sizes = plan.share, plan.share if exact else shape.rows, shape.keys, fewest, most
        seen = {x: getattr(plan.options, x) for x in ("window", "chunk", "part")}
        cut = _Cut(*sizes, **seen, pieces=count, least=least_split(shape), fixed=exact * _FIXED_PIECE)
        if (items := work_list(batch, cut)) is not None:
            yield _with_room(batch, items, plan, is_extend=bool(is_extend))


def _with_room(batch: SequenceBatch, items: _WorkList, plan: Plan, *, is_extend: bool) -> _Work:
    heads, height = plan.kv_heads, items.height
    shape, rows = (items.parts, heads, height), (plan.v_pad, plan.lse_words)
    name = _Work, shape, rows
    if name not in batch.kept:
        device = batch.tables.device
        batch.kept[name] = [torch.empty(*shape, row, device=device, dtype=torch.float32) for row in rows]
    parts, lses = batch.kept[name]
    together = _MERGED_ROWS[is_extend]
    merged = None if items.merged is None else (len(items.merged), heads, -(-height // together))
    return _Work(items, is_extend, parts, lses, (len(items.items) * heads, 1, 1), merged)


def _room(batch: SequenceBatch, numbers: int) -> Tensor:
    """Return a buffer with room for `numbers` numbers per block of a sequence, shared by all layers."""
    name = _room, numbers
    if name not in batch.kept:
        stride = batch.tables.stride(0)
        batch.kept[name] = torch.empty(numbers * stride, dtype=torch.float32, device=batch.tables.device)
    room: Tensor = batch.kept[name]
    return room


_Batches = Sequence[SequenceBatch]


def _launch(
    plan: Plan, work: _Work, q: Tensor, batches: _Batches, results: _Result, sinks: Tensor | None
) -> None:
    (out, lse), (tables, *near) = results, [batch.tables for batch in batches]
    parts, lses, items = work.parts, work.lses, work.items
    read = lse if sinks is None else sinks  # otherwise a pointer that is not read
    tensors: tuple[Tensor, ...] = q, out, lse, parts, lses, items.items, tables, read
    numbers: tuple[int, ...] = *q.stride(), tables.stride(0), items.height
    if plan.room is not None:
        room = _room(batches[0], lse.numel() * plan.room) if plan.room and not work.is_extend else lse
        tensors, numbers = (*tensors, room, *near), (*numbers, *(x.stride(0) for x in near))
    plan.attend[work.is_extend](work.grid, tensors, numbers)
    if work.merge_grid is not None:
        assert items.merged is not None, "what is merged has a list"
        merged = parts, lses, out, lse, items.merged, read
        plan.merge[work.is_extend](work.merge_grid, merged, (items.height,))
