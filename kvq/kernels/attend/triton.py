"""`attend` in Triton: what a layer's launches are made of, once for all steps, and the launches."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.formats import Code
from kvq.kernels.attend.gathered import Gathered, attend_gathered, chosen, suits
from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.attend.rounding import ROUNDED
from kvq.kernels.attend.triton_kernel import attend_kernel
from kvq.kernels.attend.triton_merge import merge_kernel
from kvq.kernels.attend.triton_work import Cut, WorkList, work_list
from kvq.kernels.gpu.launch import Bound
from kvq.kernels.gpu.rows import FP8, INT4, INT8, part_arguments
from kvq.kernels.gpu.shapes import (
    MOST_DECODE_ROWS,
    TileShape,
    changes,
    decode_shape,
    extend_shape,
    folded_keys,
    least_split,
    pieces,
    target,
)
from kvq.kernels.paged import PagedKV, SequenceBatch

_MERGED_TOGETHER = 16  # rows of parts that a program of the merge reads together
_MERGED_ROWS = 1, 4  # of the result, of decode tiles and of extend tiles
_ATTENDED = (
    *("q_ptr", "out_ptr", "lse_ptr", "parts_ptr", "part_lses_ptr"),
    *("items_ptr", "tables_ptr", "sink_ptr"),
)
_MERGED = "parts_ptr", "part_lses_ptr", "out_ptr", "lse_ptr", "merged_ptr", "sink_ptr"
_NUMBERS = "q_token", "q_head", "q_dim", "table_stride", "height"

_LEAST_PAD = 32  # columns of an 8-bit product
_LARGE_ROWS = 64  # of Hopper's own products
_MANY = (1 << 31) - 1  # query rows: no limit


def attend(
    q: Tensor,
    kv: PagedKV,
    batch: SequenceBatch,
    options: AttentionOptions,
    *,
    skip_last: int = 0,
    rounded: bool = False,
) -> tuple[Tensor, Tensor]:
    """Do what the reference does; see there. Tables are not checked.

    Queries of fp16 and bf16 are multiplied in 16 bits and summed in fp32, fp32 queries in fp32. With
    `rounded`, queries over K of FP8 or INT8 are rounded to 8 bits and multiplied by its codes as they lie.
    Nothing here asks the device, nor of a captured batch the length of a context, so that all of it can be
    captured in a graph.
    """
    if q.device.type == "cpu" and q.dtype is not torch.float32:  # the interpreter can't round to bf16
        out, lse = attend(q.float(), kv, batch, options, skip_last=skip_last, rounded=rounded)
        return out.to(q.dtype), lse
    plan = _plan(q, kv, options, rounded=rounded and kv.formats.k.code in ROUNDED)
    tokens, q_heads, _ = q.shape
    out = q.new_empty((tokens, q_heads, plan.v_dim))
    lse = q.new_empty((tokens, q_heads), dtype=torch.float32)
    step = _step(batch, plan, skip_last)
    for work in step.works:
        _launch(plan, work, q, batch.tables, (out, lse), options.sinks)
    if step.gathered:
        attend_gathered(q, kv, batch, options, step.gathered, (out, lse))
    return out, lse


class _Cutting(NamedTuple):
    """What the work of a step depends on beside the batch: layers that agree in it share their lists."""

    share: int
    kv_heads: int
    v_pad: int
    window: int | None
    may_gather: bool
    decode: TileShape
    extend: TileShape


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Plan:
    """A layer's launches, but for what changes from step to step."""

    name: tuple[Any, ...]  # the cutting as plain numbers, whose hash costs little
    cutting: _Cutting
    v_dim: int
    attend: tuple[Bound, Bound]  # of decode tiles, and of extend tiles
    merge: tuple[Bound, Bound]


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A step's tiles of one height, and room for the parts of those that are split."""

    items: WorkList
    is_extend: bool
    parts: Tensor  # fp32 [parts, kv_heads, height, V_PAD]; layers run one after another, so all use this
    lses: Tensor  # fp32 [parts, kv_heads, height]
    grid: tuple[int, int, int]
    merge_grid: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """Who attends to which sequence of a step."""

    works: list[_Work]
    gathered: list[Gathered]


def _plan(q: Tensor, kv: PagedKV, options: AttentionOptions, *, rounded: bool = False) -> _Plan:
    """Worked out once for a layer's blocks and kept with them."""
    name = (
        *(attend, q.dtype, q.shape[1], rounded, changes()),
        *(options.scale, options.window, options.softcap, options.sinks is None),
    )
    found: _Plan | None = kv.kept.get(name)
    if found is None:
        found = kv.kept[name] = _planned(q, kv, options, rounded=rounded)
    return found


def _planned(q: Tensor, kv: PagedKV, options: AttentionOptions, *, rounded: bool = False) -> _Plan:
    q_heads, kv_heads = q.shape[1], kv.k.codes.shape[1]
    shapes = decode_shape(kv, q), extend_shape(kv, q)
    k, v = (_part(x, q, kv) for x in ("k", "v"))
    merge = {
        **{x: v[x] for x in ("V_DIM", "V_PAD", "V_ROTATED")},
        "Q_HEADS": q_heads,
        "SHARE": q_heads // kv_heads,
        "SINKS": options.sinks is not None,
    }
    common = {
        **merge,
        **v,
        "BLOCK_SIZE": kv.block_size,
        "scale": options.scale,
        "softcap": options.softcap or 1.0,
        "window": options.window or 0,
        "WINDOW": options.window is not None,
        "SOFTCAP": options.softcap is not None,
    }
    attends = (
        {
            **common,
            **(_rounded(q, kv, k) if rounded and _has_product(kv, q, x) else k),
            **{"ROWS": x.rows, "KEYS": x.keys, "FOLDED": folded_keys(x), "SPREAD": _spread(x)},
            **x.options(),
        }
        for x in shapes
    )
    merges = ({**merge, "ROWS": n, "AT_ONCE": _MERGED_TOGETHER // n, "num_warps": 4} for n in _MERGED_ROWS)
    decode, extend = (Bound(attend_kernel, _ATTENDED, _NUMBERS, **own) for own in attends)
    one, more = (Bound(merge_kernel, _MERGED, ("height",), **own) for own in merges)
    may_gather = not rounded and suits(q, kv, options)  # rounded: the same numbers for every step
    cutting = _Cutting(q_heads // kv_heads, kv_heads, v["V_PAD"], options.window, may_gather, *shapes)
    return _Plan(
        name=(*cutting[:5], *astuple(shapes[0]), *astuple(shapes[1])),
        cutting=cutting,
        v_dim=v["V_DIM"],
        attend=(decode, extend),
        merge=(one, more),
    )


def _step(batch: SequenceBatch, plan: _Plan, skip_last: int) -> _Step:
    """Tiles of a batch, and what is gathered; worked out once for all layers that cut alike."""
    name = plan.name, skip_last
    found: _Step | None = batch.kept.get(name)
    if found is None:
        found = batch.kept[name] = _shared_out(batch, plan.cutting, skip_last)
    return found


def _shared_out(batch: SequenceBatch, cutting: _Cutting, skip_last: int) -> _Step:
    gathered: list[Gathered] = []
    if cutting.may_gather:
        q_heads = cutting.share * cutting.kv_heads
        gathered = list(chosen(batch, q_heads, cutting.share, cutting.window, skip_last))
    rest = batch.without(own.sequence for own in gathered)
    return _Step(list(_works(rest, cutting, skip_last)), gathered)


def _works(batch: SequenceBatch, cutting: _Cutting, skip_last: int) -> Iterator[_Work]:
    limits = (1, MOST_DECODE_ROWS), (MOST_DECODE_ROWS + 1, _MANY)
    for shape, (fewest, most) in zip((cutting.decode, cutting.extend), limits, strict=True):
        cut = Cut(
            share=cutting.share,
            rows=shape.rows,
            keys=shape.keys,
            fewest=fewest,
            most=most,
            window=cutting.window,
            skip_last=skip_last,
            pieces=pieces(shape, cutting.kv_heads, batch.tables.device),
            least=least_split(shape),
        )
        if (items := work_list(batch, cut)) is not None:
            yield _with_room(batch, items, cutting, is_extend=shape is cutting.extend)


def _with_room(batch: SequenceBatch, items: WorkList, cutting: _Cutting, *, is_extend: bool) -> _Work:
    heads, height = cutting.kv_heads, items.height
    shape = items.parts, heads, height
    name = _Work, shape, cutting.v_pad
    if name not in batch.kept:
        device = batch.tables.device
        batch.kept[name] = [torch.empty(*shape, *row, device=device) for row in ((cutting.v_pad,), ())]
    parts, lses = batch.kept[name]
    rows = _MERGED_ROWS[is_extend]
    merged = None if items.merged is None else (len(items.merged), heads, -(-height // rows))
    return _Work(items, is_extend, parts, lses, (len(items.items) * heads, 1, 1), merged)


def _launch(
    plan: _Plan,
    work: _Work,
    q: Tensor,
    tables: Tensor,
    results: tuple[Tensor, Tensor],
    sinks: Tensor | None,
) -> None:
    out, lse = results
    parts, lses, items = work.parts, work.lses, work.items
    read = lse if sinks is None else sinks  # else a pointer that is not read
    tensors = q, out, lse, parts, lses, items.items, tables, read
    plan.attend[work.is_extend](work.grid, tensors, (*q.stride(), tables.stride(0), items.height))
    if work.merge_grid is not None:
        assert items.merged is not None, "what is merged has a list"
        merged = parts, lses, out, lse, items.merged, read
        plan.merge[work.is_extend](work.merge_grid, merged, (items.height,))


def _part(name: str, q: Tensor, kv: PagedKV) -> dict[str, Any]:
    """K or V as the kernel takes it: codes as words of two bytes and scales by pairs of tokens where they lie
    so that they can be, and numbers to compute in."""
    part, upper = part_arguments(name, kv), name.upper()
    rows, code = getattr(kv, name), getattr(kv.formats, name).code
    half_row = part[f"{upper}_DIM"] // 2
    is_int4 = part[f"{upper}_KIND"] == INT4.value
    run = min(part[f"{upper}_GROUP"], half_row) if is_int4 else part[f"{upper}_DIM"]  # bytes
    is_packed = part[f"{upper}_KIND"] in (FP8.value, INT8.value, INT4.value)
    words = is_packed and run % 2 == 0 and _as_pairs(rows.codes)
    if words:
        part |= _strided(f"{name}_codes", f"{name}c", rows.codes.view(torch.int16))
    # Scales of one per row as words of two neighbouring tokens, where strides allow it.
    paired = (
        words and rows.scales is not None and rows.scales.shape[3] == 1 and _as_pairs(rows.scales[..., 0])
    )
    if paired:
        part |= _strided(f"{name}_scales", f"{name}s", rows.scales[..., 0].view(torch.int32))
    groups = part[f"{upper}_DIM"] // part[f"{upper}_GROUP"]
    least = 16 if name == "k" else 8  # summed over by K's product, columns of V's
    return part | {
        f"{upper}_PAIRED": paired,
        f"{upper}_WORDS": words,
        f"{upper}_RUN": run,
        f"{upper}_WIDTH": max(16, triton.next_power_of_2(run // 2)),
        f"{upper}_PAIRS": max(least, triton.next_power_of_2(2 * groups)),
        f"{upper}_COMPUTE": _compute_dtype(code, q, words=words),
        **({"K_ROUNDED": False} if name == "k" else {}),
    }


def _has_product(kv: PagedKV, q: Tensor, shape: TileShape) -> bool:
    """Whether a tile's codes of K are multiplied as they lie. Where a GPU has products of 64 rows, Triton
    makes products of fp16 out of smaller ones of FP8; then words and queries in 16 bits are less work."""
    has_large = target(q).startswith(("sm9", "sm10"))
    return kv.formats.k.code is Code.INT8 or shape.rows >= _LARGE_ROWS or not has_large


def _spread(shape: TileShape) -> int:
    """Rows of a tile of words that have an element for every thread; 1: there are keys enough."""
    threads = 32 * shape.warps
    return 2 * threads // shape.keys if threads > shape.keys else 1


def _rounded(q: Tensor, kv: PagedKV, k: dict[str, Any]) -> dict[str, Any]:
    """K where queries are rounded: its bytes are read as they are multiplied."""
    codes = kv.k.codes
    if kv.formats.k.code is Code.FP8 and q.device.type != "cpu":  # the interpreter has no such numbers
        codes = codes.view(torch.float8_e4m3fn)
    return {
        **k,
        **_strided("k_codes", "kc", codes),
        "K_ROUNDED": True,
        "K_WORDS": False,
        "K_PAD": max(k["K_PAD"], _LEAST_PAD),
    }


def _as_pairs(x: Tensor) -> bool:
    """Whether neighbours in the last dimension can be seen as one element of twice the size."""
    return x.stride(-1) == 1 and not any(n % 2 for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))


def _strided(pointer: str, strides: str, rows: Tensor) -> dict[str, Any]:
    """Rows as arguments of the kernel."""
    names = (f"{strides}_block", f"{strides}_head", f"{strides}_slot")
    return {pointer: rows, **dict(zip(names, rows.stride(), strict=False))}


def _compute_dtype(code: Code, q: Tensor, *, words: bool) -> tl.dtype:
    if q.device.type == "cpu" or q.dtype is torch.float32 or code is Code.FP32:
        return tl.float32  # the interpreter's 16-bit products can't be trusted
    if words or code is Code.FP16:
        return tl.float16
    if code is Code.BF16:
        return tl.bfloat16
    return tl.bfloat16 if q.dtype is torch.bfloat16 else tl.float16
