"""`attend` in Triton: tiles of few query rows split their keys, tiles of many take them all."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.formats import Code
from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.attend.triton_kernel import attend_kernel, merge_kernel
from kvq.kernels.gpu.rows import dense_strides, kind_of, part_arguments, unit
from kvq.kernels.gpu.shapes import (
    DECODE_ROWS,
    MOST_DECODE_ROWS,
    TileShape,
    decode_shape,
    extend_shape,
    split_keys,
)
from kvq.kernels.paged import PagedKV, SequenceBatch


def attend(
    q: Tensor,
    kv: PagedKV,
    batch: SequenceBatch,
    options: AttentionOptions,
    *,
    skip_last: int = 0,
) -> tuple[Tensor, Tensor]:
    """Do what the reference does; see there. Tables are not checked.

    Queries of fp16 and bf16 are multiplied in 16 bits and summed in fp32, fp32 queries in fp32.
    """
    if q.device.type == "cpu" and q.dtype is not torch.float32:  # the interpreter can't round to bf16
        out, lse = attend(q.float(), kv, batch, options, skip_last=skip_last)
        return out.to(q.dtype), lse
    tokens, q_heads, _ = q.shape
    share = q_heads // kv.k.codes.shape[1]
    out = torch.empty(tokens, q_heads, kv.formats.v_head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, q_heads, device=q.device)
    for step in _steps(batch, share, q.device, extend_shape(kv, q)):
        _launch(q, kv, step, (out, lse), options, skip_last)
    return out, lse


@dataclass(frozen=True, slots=True)
class _Step:
    """The sequences of a batch whose new tokens fill tiles of one height."""

    tables: Tensor  # of all sequences
    rows: int  # of a tile
    tiles: Tensor  # int32 [tiles, 2]: sequence, first row
    longest: int  # keys
    keys: int  # of all sequences
    is_decode: bool
    lens: tuple[Tensor, Tensor, Tensor]  # int32 [sequences]: first token, new tokens, context


def _steps(batch: SequenceBatch, share: int, device: torch.device, shape: TileShape) -> list[_Step]:
    """Decode and extend tiles of a batch; worked out once for all layers of a kind."""
    name = (_Step, share, shape.rows)
    if name not in batch.kept:
        lens = _lens(batch, device) if batch.lens is None else batch.lens.unbind(0)
        few = [i for i, new in enumerate(batch.query_lens) if 0 < new * share <= MOST_DECODE_ROWS]
        many = [i for i, new in enumerate(batch.query_lens) if new * share > MOST_DECODE_ROWS]
        batch.kept[name] = [
            _step(batch, chosen, share, rows, lens, is_decode=chosen is few)
            for chosen, rows in ((few, DECODE_ROWS), (many, shape.rows))
            if chosen
        ]
    steps: list[_Step] = batch.kept[name]
    return steps


def _lens(batch: SequenceBatch, device: torch.device) -> tuple[Tensor, ...]:
    """int32 [sequences] each, so that all are aligned alike: first token, new tokens, context."""
    lens = list(accumulate(batch.query_lens, initial=0))[:-1], batch.query_lens, batch.context_lens
    return tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in lens)


def _step(
    batch: SequenceBatch,
    chosen: list[int],
    share: int,
    rows: int,
    lens: Any,
    *,
    is_decode: bool,
) -> _Step:
    tiles = [(i, row) for i in chosen for row in range(0, batch.query_lens[i] * share, rows)]
    keys = [batch.context_lens[i] for i in chosen]
    return _Step(
        tables=batch.tables,
        rows=rows,
        tiles=torch.tensor(tiles, dtype=torch.int32, device=lens[0].device),
        longest=max(keys),
        keys=sum(keys),
        is_decode=is_decode,
        lens=lens,
    )


def _launch(
    q: Tensor,
    kv: PagedKV,
    step: _Step,
    results: tuple[Tensor, Tensor],
    options: AttentionOptions,
    skip_last: int,
) -> None:
    out, lse = results
    kv_heads, (first, new, context) = kv.k.codes.shape[1], step.lens
    shape = decode_shape(kv, q) if step.is_decode else extend_shape(kv, q)
    k, v = (_part(x, q, kv) for x in ("k", "v"))
    per_split = split_keys(step.longest, step.keys * kv_heads, q.device, shape)
    splits = -(-step.longest // per_split) if step.is_decode else 1
    parts, part_lses = out, lse
    if splits > 1:
        parts = torch.empty(splits, *lse.shape, v["V_PAD"], device=q.device)
        part_lses = torch.empty(splits, *lse.shape, device=q.device)
    strides = parts.stride() if splits > 1 else (0, *out.stride())
    lens = {"tiles_ptr": step.tiles, "first_ptr": first, "new_ptr": new, "context_ptr": context}
    common = {
        **lens,
        "sink_ptr": lse if options.sinks is None else options.sinks,
        "skip_last": skip_last,
        "lse_part": part_lses.stride(0),
        "split_keys": per_split,
        "Q_HEADS": q.shape[1],
        "SHARE": q.shape[1] // kv_heads,
        "SINKS": options.sinks is not None,
    }
    attend_kernel[(len(step.tiles), kv_heads, splits)](
        q,
        parts,
        part_lses,
        tables_ptr=step.tables,
        table_stride=step.tables.stride(0),
        **dense_strides("q", q),
        out_part=strides[0],
        out_token=strides[1],
        out_head=strides[2],
        **k,
        **v,
        BLOCK_SIZE=kv.block_size,
        ROWS=step.rows,
        KEYS=shape.keys,
        SPLIT=splits > 1,
        num_warps=shape.warps,
        num_stages=shape.stages,
        scale=options.scale,
        softcap=options.softcap or 1.0,
        window=options.window or 0,
        WINDOW=options.window is not None,
        SOFTCAP=options.softcap is not None,
        **common,
    )
    if splits > 1:
        merge_kernel[(len(step.tiles), kv_heads, step.rows)](
            parts,
            part_lses,
            out,
            lse,
            out_part=parts.stride(0),
            out_token=out.stride(0),
            out_head=out.stride(1),
            V_DIM=v["V_DIM"],
            V_PAD=v["V_PAD"],
            V_ROTATED=v["V_ROTATED"],
            AT_ONCE=16,
            num_warps=4,
            **common,
        )


def _part(name: str, q: Tensor, kv: PagedKV) -> dict[str, Any]:
    """K or V as the kernel takes it: scales by pairs of tokens, numbers to compute in, runs of int4 rows."""
    part, upper = part_arguments(name, kv), name.upper()
    scales, code = getattr(kv, name).scales, getattr(kv.formats, name).code
    # Scales of one per row as words of two neighbouring tokens, where strides allow it.
    paired = (
        scales is not None
        and scales.shape[3] == 1
        and scales.stride(2) == 1
        and not any(n % 2 for n in (*scales.shape[2:3], *scales.stride()[:2]))
    )
    if paired:
        words = scales[..., 0].view(torch.int32)
        block, head, _ = words.stride()
        part |= {f"{name}_scales": words, f"{name}s_block": block, f"{name}s_head": head}
    run = min(part[f"{upper}_GROUP"], part[f"{upper}_DIM"] // 2)
    compute = _compute_dtype(code, q)
    return part | {
        f"{upper}_PAIRED": paired,
        f"{upper}_RUN": run,
        f"{upper}_WIDTH": max(16, triton.next_power_of_2(run)),
        f"{upper}_COMPUTE": compute,
        f"{upper}_UNIT": unit(kind_of(code), compute),
    }


def _compute_dtype(code: Code, q: Tensor) -> tl.dtype:
    if q.device.type == "cpu" or q.dtype is torch.float32 or code is Code.FP32:
        return tl.float32  # the interpreter's 16-bit products can't be trusted
    if code in (Code.FP8, Code.FP16):
        return tl.float16
    if code is Code.BF16:
        return tl.bfloat16
    return tl.bfloat16 if q.dtype is torch.bfloat16 else tl.float16
