"""`attend_latent` in Triton: what a layer's launches are made of, and the launches."""

from typing import Any

import torch
from torch import Tensor

from kvq.formats import KVFormat
from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.attend.triton import compute_dtype
from kvq.kernels.attend.triton_step import Cutting, Plan, launched, options_of_layer, plan_of
from kvq.kernels.attend_latent.triton_kernel import latent_kernel
from kvq.kernels.attend_latent.triton_turn import turned
from kvq.kernels.codec import hadamard_block
from kvq.kernels.gpu.arguments import part_arguments
from kvq.kernels.gpu.rows import FP8, INT4, INT8
from kvq.kernels.gpu.shapes import DECODE_ROWS, latent_shape
from kvq.kernels.paged import PagedKV, SequenceBatch

_LEAST_COLUMNS = 16  # of a product
_PART_COLUMNS = 128  # of a row that are numbers in registers at once


def attend_latent(
    q: Tensor,
    kv: PagedKV,
    batch: SequenceBatch,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Do what the reference does; see there, and Triton's `attend` for dtypes. Tables are not checked."""
    if q.device.type == "cpu" and q.dtype is not torch.float32:  # the interpreter can't round to bf16
        out, lse = attend_latent(q.float(), kv, batch, options)
        return out.to(q.dtype), lse
    assert options.chunk is None, "no model of latent attention has chunks"
    plan = plan_of(_planned, q, kv, options)
    fmt = kv.formats
    if not (fmt.k.rotated or fmt.v.rotated):
        return launched(plan, q, batch, options.sinks)[0]
    latent, rotary = ((dim, hadamard_block(dim) if own.rotated else 1) for own, dim in _parts_of(kv))
    queries = turned(q, (latent, rotary), torch.float32)
    (out, lse), _ = launched(plan, queries, batch, options.sinks)
    return turned(out, (latent,), q.dtype), lse


def _planned(q: Tensor, kv: PagedKV, options: AttentionOptions) -> Plan:
    q_heads = q.shape[1]
    k, v = part_arguments("k", kv), part_arguments("v", kv)
    code = kv.formats.v.code
    in_halves = v["V_KIND"] == INT4.value and v["V_DIM"] == v["V_PAD"] and v["V_DIM"] // 2 >= _LEAST_COLUMNS
    unscaled = v["V_KIND"] in (FP8.value, INT8.value)
    fixed = {
        **options_of_layer(options, q_heads, 1),
        **k,
        **v,
        "V_ROTATED": 1,  # for the merge: results are turned behind it
        "K_COMPUTE": compute_dtype(kv.formats.k.code, q, words=False),
        "V_COMPUTE": compute_dtype(code, q, words=in_halves or unscaled),
        "PARTS": _parts(v, in_halves=in_halves),
        "HALVES": in_halves,
        "CODES": unscaled,
        "BLOCK_SIZE": kv.block_size,
    }
    cutting = Cutting(
        share=q_heads,
        kv_heads=1,
        v_pad=v["V_PAD"],
        window=options.window,
        chunk=None,
        part=options.part,
        may_gather=False,
        most_decode=DECODE_ROWS,
        decode=latent_shape("latent decode", kv, q),
        extend=latent_shape("latent extend", kv, q),
    )
    return Plan.of(latent_kernel, [fixed, fixed], cutting)


def _parts_of(kv: PagedKV) -> tuple[tuple[KVFormat, int], tuple[KVFormat, int]]:
    """Formats and elements of a key's two parts, in the order that queries have."""
    fmt = kv.formats
    return (fmt.v, fmt.v_head_dim), (fmt.k, fmt.k_head_dim)


def _parts(v: dict[str, Any], *, in_halves: bool) -> int:
    """Parts that a row is read in: of _PART_COLUMNS columns, or of as many as a group has."""
    dim, padded, group = (int(v[name]) for name in ("V_DIM", "V_PAD", "V_GROUP"))
    least = group if in_halves and group < dim else 1
    return max(1 + in_halves, padded // max(_PART_COLUMNS, least))
