"""`attend` in Triton: what a layer's launches are made of, and the launches."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.formats import Code
from kvq.kernels.attend.gathered import attend_gathered, suits
from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.attend.triton_kernel import attend_kernel
from kvq.kernels.attend.triton_step import Cutting, Plan, launched, options_of_layer, plan_of
from kvq.kernels.gpu.rows import FP8, INT4, INT8, part_arguments
from kvq.kernels.gpu.shapes import MOST_DECODE_ROWS, decode_shape, extend_shape
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
    Nothing here asks the device, nor of a captured batch the length of a context, so that all of it can be
    captured in a graph.
    """
    if q.device.type == "cpu" and q.dtype is not torch.float32:  # the interpreter can't round to bf16
        out, lse = attend(q.float(), kv, batch, options, skip_last=skip_last)
        return out.to(q.dtype), lse
    plan = plan_of(_planned, q, kv, options)
    results, gathered = launched(plan, q, batch, options.sinks, skip_last)
    if gathered:
        attend_gathered(q, kv, batch, options, gathered, results)
    return results


def _planned(q: Tensor, kv: PagedKV, options: AttentionOptions) -> Plan:
    q_heads, kv_heads = q.shape[1], kv.k.codes.shape[1]
    k, v = (_part(x, q, kv) for x in ("k", "v"))
    fixed = {**options_of_layer(options, q_heads, kv_heads), **k, **v, "BLOCK_SIZE": kv.block_size}
    cutting = Cutting(
        share=q_heads // kv_heads,
        kv_heads=kv_heads,
        v_pad=v["V_PAD"],
        window=options.window,
        may_gather=suits(q, kv, options),
        most_decode=MOST_DECODE_ROWS,
        decode=decode_shape(kv, q),
        extend=extend_shape(kv, q),
    )
    return Plan.of(attend_kernel, fixed, cutting)


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
        part |= _in_pairs(part, f"{name}_codes", f"{name}c", rows.codes.view(torch.int16))
    # Scales of one per row as words of two neighbouring tokens, where strides allow it.
    paired = (
        words and rows.scales is not None and rows.scales.shape[3] == 1 and _as_pairs(rows.scales[..., 0])
    )
    if paired:
        part |= _in_pairs(part, f"{name}_scales", f"{name}s", rows.scales[..., 0].view(torch.int32))
    groups = part[f"{upper}_DIM"] // part[f"{upper}_GROUP"]
    least = 16 if name == "k" else 8  # summed over by K's product, columns of V's
    return part | {
        f"{upper}_PAIRED": paired,
        f"{upper}_WORDS": words,
        f"{upper}_RUN": run,
        f"{upper}_WIDTH": max(16, triton.next_power_of_2(run // 2)),
        f"{upper}_PAIRS": max(least, triton.next_power_of_2(2 * groups)),
        f"{upper}_COMPUTE": compute_dtype(code, q, words=words),
    }


def _as_pairs(x: Tensor) -> bool:
    """Whether neighbours in the last dimension can be seen as one element of twice the size."""
    return x.stride(-1) == 1 and not any(n % 2 for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))


def _in_pairs(part: dict[str, Any], pointer: str, strides: str, pairs: Tensor) -> dict[str, Any]:
    """The arguments of rows seen as elements of twice the size."""
    names = (f"{strides}_block", f"{strides}_head", f"{strides}_slot")
    return {pointer: pairs, **dict(zip(names, pairs.stride(), strict=False))}


def compute_dtype(code: Code, q: Tensor, *, words: bool) -> tl.dtype:
    """What products are of, for queries and codes; `words`: packed codes that lie so that fp16 holds them."""
    if q.device.type == "cpu" or q.dtype is torch.float32 or code is Code.FP32:
        return tl.float32  # the interpreter's 16-bit products can't be trusted
    if words or code is Code.FP16:
        return tl.float16
    if code is Code.BF16:
        return tl.bfloat16
    return tl.bfloat16 if q.dtype is torch.bfloat16 else tl.float16
