"""`attend` in Triton: the arguments of a layer's launches, and the launches."""

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.formats import Code, Grouped, mean_format
from kvq.kernels.attend.gathered import attend_gathered, suits
from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.attend.reference import limit_of
from kvq.kernels.attend.triton.kernel import attend_kernel
from kvq.kernels.attend.triton.step import Plan, launched, options_of_layer, plan_of
from kvq.kernels.gpu.launch import Reading, Rows, Strides, kernel_rows
from kvq.kernels.gpu.rows import PACKED
from kvq.kernels.gpu.shapes import MOST_DECODE_ROWS, TileShape, run_bytes, shape_of, takes_means_apart, target
from kvq.kernels.paged import PagedKV, SequenceBatch, StagedBatch, StagedKV

_LEAST_PAD = 32  # columns of an 8-bit product
_LARGE_ROWS = 64  # of Hopper's own products
_PARTS: tuple[Literal["k", "v"], ...] = "k", "v"
_LIMITS = "scale", "softcap", "window", "recent", "part_first", "part_last"


class _Near(NamedTuple):
    """Unquantized blocks of a staged layer as a kernel argument: those of young keys and, once they are old,
    those of the first `exact` keys. The rest of the old keys are sealed."""

    k: Rows
    v: Rows
    sinks_k: Rows | None
    sinks_v: Rows | None
    block_size: Any  # constants
    exact: Any


def attend(
    q: Tensor, kv: PagedKV, batch: SequenceBatch, options: AttentionOptions, *, rounded: bool = False
) -> tuple[Tensor, Tensor]:
    """Do what the reference does; see reference.py. Tables are not checked.

    Fp16 and bf16 queries are multiplied in 16 bits and summed in fp32; fp32 queries use fp32 throughout. With
    `rounded`, queries for K in FP8 or INT8 are rounded to 8 bits and multiplied directly by its codes.
    Nothing here waits for the device or, in a captured batch, reads context lengths, so all launches can be
    captured in a graph.
    """
    if q.device.type == "cpu" and q.dtype is not torch.float32:  # the interpreter can't round to bf16
        out, lse = attend(q.float(), kv, batch, options, rounded=rounded)
        return out.to(q.dtype), lse
    planned = _planned_rounded if rounded and limit_of(kv.formats.k) is not None else _planned
    plan = plan_of(planned, q, kv, options)
    results, gathered = launched(plan, q, batch, options.sinks)
    if gathered:
        attend_gathered(q, kv, batch, options, gathered, results)
    return results


def attend_staged(
    q: Tensor, kv: StagedKV, batch: StagedBatch, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attend over blocks of all forms together: what `attend` finds in every part of the keys, merged."""
    if q.device.type == "cpu" and q.dtype is not torch.float32:
        out, lse = attend_staged(q.float(), kv, batch, options)
        return out.to(q.dtype), lse
    plan = plan_of(_planned_staged, q, kv, options)
    return launched(plan, q, batch.sealed, options.sinks, (batch.recent, batch.sinks or batch.recent))[0]


def _planned(
    q: Tensor, kv: PagedKV, options: AttentionOptions, rounded: bool = False, staged: StagedKV | None = None
) -> Plan:
    q_heads, kv_heads = q.shape[1], kv.k.codes.shape[1]
    decode, extend = shape_of("decode", kv, q), shape_of("extend", kv, q)
    fixed = options_of_layer(options, q_heads, kv_heads)
    fixed |= {"BLOCK_SIZE": kv.block_size, "near": None}
    if staged is not None:
        fixed |= {"recent": staged.exact.recent, "AGE_BLOCK": kv.block_size, "part_first": staged.exact.sinks}
    fixed["limits"] = tuple(fixed[name] for name in _LIMITS)
    own: list[dict[str, Any]] = []
    for shape in (decode, extend):
        apart = shape is decode and _means_are_apart(kv, shape)
        k, v = _read_rows("k", q, kv, shape, apart), _read_rows("v", q, kv, shape, apart)
        if rounded and _has_product(kv, q, shape):
            k = _rounded(q, kv, k)
        is_lower = _is_lower(options, shape) or fixed["part_first"] % shape.keys != 0
        given: dict[str, Any] = {"SPREAD": _spread(shape), "LOWER": is_lower, "APART": apart}
        if staged is not None:
            both, exact = (staged.recent, staged.sinks), staged.exact.sinks if staged.sinks else 0
            rows: list[Any] = [
                x and _read_rows(part, q, x, shape, apart=False) for x in both for part in _PARTS
            ]
            given["near"] = _Near(*rows, *map(tl.constexpr, (staged.recent.block_size, exact)))
        own.append({"k": k, "v": v, **given})
    # Rounded queries have the same numbers in every step.
    most, gathers = MOST_DECODE_ROWS, not (rounded or staged) and suits(q, kv, options)
    own = [fixed | x for x in own]
    return Plan.of(attend_kernel, own, (decode, extend), options, most_decode=most, may_gather=gathers)


_planned_rounded = partial(_planned, rounded=True)


def _planned_staged(q: Tensor, kv: StagedKV, options: AttentionOptions) -> Plan:
    return _planned(q, kv.sealed, options, staged=kv)


def _read_rows(part: Literal["k", "v"], q: Tensor, kv: PagedKV, shape: TileShape, apart: bool) -> Rows:
    """Return K or V as a kernel argument: codes as two-byte words and scales by pairs of tokens if the layout
    allows this, and the dtype of products. `apart`: means, if any, are added outside the loop.
    """
    rows = kernel_rows(part, kv)
    paged, fmt = getattr(kv, part), getattr(kv.formats, part)
    run = run_bytes(fmt, rows.dim)
    if fmt.is_per_channel:
        words = part == "k" and _has_channel_words(kv, shape)
    else:
        words = not fmt.code.is_float and run > 0 and _as_pairs(paged.codes)
    if paged.means is not None:
        words = words and (apart or _means_in_runs(part, kv, shape))
    # Single scales per row as words of two adjacent tokens, if strides allow it.
    of_rows = None if paged.scales is None or paged.scales.shape[3] != 1 else paged.scales[..., 0]
    paired = words and of_rows is not None and _as_pairs(of_rows)
    if words:
        if fmt.code.is_grouped and not fmt.is_per_channel:
            rows = rows._replace(kind=PACKED[fmt.code.bits].value)
        rows = rows.with_codes(paged.codes.view(torch.int16))
        if paired and of_rows is not None:
            rows = rows.with_scales(of_rows.view(torch.int32))
        if fmt.is_narrow:
            rows = rows.with_scales(_narrow_words(paged.scales))
        if paged.means is not None:
            means = _narrow_words(paged.means)
            rows = rows._replace(means=means, mean_strides=Strides(*means.stride()[:2]))
    groups = rows.dim // rows.group
    columns = groups if fmt.is_narrow else 2 * groups
    columns *= 2 if part == "v" and paged.means is not None and not apart else 1
    # K's product sums over these, narrow ones twice; in V's product they are columns.
    least = 16 if part == "k" and columns > groups else 8
    read = Reading(
        words=words,
        run=run,
        width=max(16, triton.next_power_of_2(run // 2)),
        pairs=max(least, triton.next_power_of_2(columns)),
        paired=paired,
        compute=compute_dtype(fmt.code, q, words=words),
    )
    return rows._replace(read=read)


def _means_are_apart(kv: PagedKV, shape: TileShape) -> bool:
    """Return True if the means of all blocks, or K's offsets, are added outside the loop over keys."""
    if kv.formats.k.is_per_channel and not kv.formats.v.mean:
        return _has_channel_words(kv, shape)
    tensors = [tensor for x in (kv.k, kv.v) if x.means is not None for tensor in (x.codes, x.means)]
    as_pairs = all(map(_as_pairs, tensors))
    return as_pairs and takes_means_apart(kv.formats, shape, kv.block_size)


def _has_channel_words(kv: PagedKV, shape: TileShape) -> bool:
    """Return True if K's rows with per-channel scales are read as words."""
    run = run_bytes(kv.formats.k, kv.formats.k_head_dim)
    return run > 0 and kv.block_size % shape.keys == 0 and _as_pairs(kv.k.codes)


def _means_in_runs(name: str, kv: PagedKV, shape: TileShape) -> bool:
    """Return True if a tile has a single mean, which is read in its rows' runs, two narrow scales at once."""
    fmt, dim = getattr(kv.formats, name), getattr(kv.formats, f"{name}_head_dim")
    scale, means = mean_format(dim).scale, getattr(kv, name).means
    assert isinstance(scale, Grouped), "means are grouped"
    is_run = scale.group_size % run_bytes(fmt, dim) == 0 and fmt.scale.group_size <= scale.group_size
    is_whole = fmt.code.bits == 4 and fmt.is_narrow and kv.block_size % shape.keys == 0
    return is_whole and is_run and dim // scale.group_size in (2, 4, 8) and _as_pairs(means.view(torch.int16))


def _has_product(kv: PagedKV, q: Tensor, shape: TileShape) -> bool:
    """Return True if the codes in a tile of K are multiplied directly.

    On GPUs with products of 64 rows, Triton turns smaller FP8 products into fp16 products; reading words and
    multiplying 16-bit queries is then less work.
    """
    has_large = target(q).startswith(("sm9", "sm10"))
    return kv.formats.k.code is Code.INT8 or shape.rows >= _LARGE_ROWS or not has_large


def _is_lower(options: AttentionOptions, shape: TileShape) -> bool:
    """Return True if a tile may have hidden keys before visible ones."""
    is_young = options.part is not None and options.part.is_young
    return is_young or (options.window, options.chunk) != (None, None)


def _spread(shape: TileShape) -> int:
    """Return the number of rows with which a tile of words has an element for every thread, at least 1."""
    threads = 32 * shape.warps
    return 2 * threads // shape.keys if threads > shape.keys else 1


def _rounded(q: Tensor, kv: PagedKV, k: Rows) -> Rows:
    """Return K for rounded queries, with its codes in the form in which they are multiplied."""
    codes = kv.k.codes
    if kv.formats.k.code is Code.FP8 and q.device.type != "cpu":  # the interpreter has no such numbers
        codes = codes.view(torch.float8_e4m3fn)
    k = k.with_codes(codes)._replace(pad=max(k.pad, _LEAST_PAD))
    assert k.read is not None, "attention reads it"
    return k._replace(read=k.read._replace(rounded=True, words=False))


def _as_pairs(x: Tensor) -> bool:
    """Return True if each pair of elements in the last dimension can be viewed as one wider element."""
    return x.stride(-1) == 1 and not any(n % 2 for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))


def _narrow_words(scales: Tensor | None) -> Tensor:
    """Return 8-bit scales and minimums (or means, which end with them) as words of two groups each if the
    layout allows this, otherwise of one group."""
    assert scales is not None, "narrow scales are stored"
    pairs = scales.view(torch.uint16)
    return pairs.view(torch.uint32) if _as_pairs(pairs) else pairs


def compute_dtype(code: Code, q: Tensor, *, words: bool) -> tl.dtype:
    """Return the dtype of products with codes. `words`: codes are read as words, which are exact in fp16."""
    if q.device.type == "cpu" or q.dtype is torch.float32 or code is Code.FP32:
        return tl.float32  # the interpreter's 16-bit products can't be trusted
    if words or code is Code.FP16:
        return tl.float16
    if code is Code.BF16:
        return tl.bfloat16
    return tl.bfloat16 if q.dtype is torch.bfloat16 else tl.float16
