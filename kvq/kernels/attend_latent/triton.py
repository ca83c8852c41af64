"""`attend_latent` in Triton: the arguments of a layer's launches, and the launches."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.attend.triton.attend import compute_dtype
from kvq.kernels.attend.triton.step import Plan, launched, options_of_layer, plan_of
from kvq.kernels.attend_latent.triton_kernel import latent_kernel
from kvq.kernels.codec import hadamard_block
from kvq.kernels.gpu.launch import Reading, Rows, kernel_rows, launch
from kvq.kernels.gpu.rows import FP8, INT4, INT8, rotate, rounded
from kvq.kernels.gpu.shapes import DECODE_ROWS, shape_of
from kvq.kernels.paged import PagedKV, SequenceBatch

_LEAST_COLUMNS = 16  # of a product
_PART_COLUMNS = 128  # of a row that are decoded in registers at once


def attend_latent(
    q: Tensor, kv: PagedKV, batch: SequenceBatch, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Do what the reference does; see `attend` in Triton for dtypes. Tables are not checked."""
    if q.device.type == "cpu" and q.dtype is not torch.float32:  # the interpreter can't round to bf16
        out, lse = attend_latent(q.float(), kv, batch, options)
        return out.to(q.dtype), lse
    assert options.chunk is None, "no model of latent attention has chunks"
    plan = plan_of(_planned, q, kv, options)
    fmt = kv.formats
    if not (fmt.k.rotated or fmt.v.rotated):
        return launched(plan, q, batch, options.sinks)[0]
    parts = (fmt.v, fmt.v_head_dim), (fmt.k, fmt.k_head_dim)  # of a key, in the order that queries have
    latent, rotary = ((dim, hadamard_block(dim) if own.rotated else 1) for own, dim in parts)
    queries = turned(q, (latent, rotary), torch.float32)
    (out, lse), _ = launched(plan, queries, batch, options.sinks)
    return turned(out, (latent,), q.dtype), lse


def _planned(q: Tensor, kv: PagedKV, options: AttentionOptions) -> Plan:
    q_heads = q.shape[1]
    k, v = kernel_rows("k", kv), kernel_rows("v", kv)
    in_halves = v.kind == INT4.value and v.dim == v.pad and v.dim // 2 >= _LEAST_COLUMNS
    unscaled = v.kind in (FP8.value, INT8.value)
    of_k = compute_dtype(kv.formats.k.code, q, words=False)
    of_v = compute_dtype(kv.formats.v.code, q, words=in_halves or unscaled)
    fixed = {
        **options_of_layer(options, q_heads, 1),
        "k": k._replace(read=Reading.one_by_one(of_k)),
        # Not rotated for the merge: results are rotated after it.
        "v": v._replace(read=Reading.one_by_one(of_v), rotated=1),
        **{"PARTS": _parts(v, in_halves=in_halves), "HALVES": in_halves, "CODES": unscaled},
        "BLOCK_SIZE": kv.block_size,
    }
    shapes = shape_of("latent decode", kv, q), shape_of("latent extend", kv, q)
    return Plan.of(latent_kernel, [fixed, fixed], shapes, options, most_decode=DECODE_ROWS, may_gather=False)


def _parts(v: Rows, *, in_halves: bool) -> int:
    """Return the number of parts in which a row is read: parts of _PART_COLUMNS columns, or of one group."""
    least = v.group if in_halves and v.group < v.dim else 1
    return max(1 + in_halves, int(v.pad) // max(_PART_COLUMNS, least))


def turned(x: Tensor, parts: tuple[tuple[int, int], ...], dtype: torch.dtype) -> Tensor:
    """Return rows [tokens, heads, dim] in another dtype, with parts of adjacent columns rotated in blocks.

    Queries are rotated here before attention over latents, and results after it. In the attention kernel,
    every program would rotate a row of 512 again, in a layout that adds 30 instructions per key (counted).

    `parts`: one or two pairs (columns, block size); block sizes are powers of two, 1 for no rotation.
    """
    tokens, heads, _ = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    (first, first_block), (second, second_block) = (*parts, (0, 1))[:2]
    if tokens:
        launch(
            turn_kernel,
            (tokens * heads, 1, 1),
            (x, out),
            (*x.stride(), heads),
            {
                **{"FIRST": first, "FIRST_PAD": triton.next_power_of_2(first), "FIRST_BLOCK": first_block},
                **{"SECOND": second, "SECOND_PAD": triton.next_power_of_2(second)},
                **{"SECOND_BLOCK": second_block, "num_warps": 1},
            },
        )
    return out


@triton.jit(do_not_specialize=["heads"])
def turn_kernel(
    x_ptr, out_ptr, x_token, x_head, x_dim, heads,
    FIRST: tl.constexpr, FIRST_PAD: tl.constexpr, FIRST_BLOCK: tl.constexpr,
    SECOND: tl.constexpr, SECOND_PAD: tl.constexpr, SECOND_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate rows and convert their dtype; see `turned`. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row // heads * x_token + row % heads * x_head
    out_ptr += row * (FIRST + SECOND)
    _turn(x_ptr, out_ptr, x_dim, FIRST, FIRST_PAD, FIRST_BLOCK)
    if SECOND > 0:
        _turn(x_ptr + FIRST * x_dim, out_ptr + FIRST, x_dim, SECOND, SECOND_PAD, SECOND_BLOCK)


@triton.jit
def _turn(x_ptr, out_ptr, stride, DIM: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr):
    col = tl.arange(0, PAD)
    x = tl.load(x_ptr + col * stride, mask=col < DIM, other=0.0).to(tl.float32)
    if BLOCK > 1:
        x = tl.reshape(rotate(tl.reshape(x, (1, PAD)), 1, PAD, BLOCK), (PAD,))
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + col, rounded(x, DTYPE).to(DTYPE), mask=col < DIM)
