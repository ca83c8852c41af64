"""Attention over FP8 and INT8 rows of K by 8-bit products in Triton: queries are rounded as K's rows are.

A query row gets one scale, its largest element over what the code holds, and its codes are multiplied with
K's as they lie. INT8 products are summed exactly, FP8 ones by the tensor core's own fp32.
"""

import triton
import triton.language as tl

from kvq.kernels.gpu.rows import INT8, INTERPRETED, e4m3, fp8_codes

_LEAST = tl.constexpr(1e-30)  # what a row's largest element counts as at least: its inverse must be finite
_TO_WHOLE = tl.constexpr(12582912.0)  # added to a small number: the low bits are that number to nearest even


@triton.jit
def rounded_queries(y, KIND: tl.constexpr):
    """fp32 [rows, columns] -> codes of K's kind and a scale for each row, fp32 [rows]; NaN stays NaN."""
    LIMIT: tl.constexpr = 127.0 if KIND == INT8 else 448.0
    top = tl.maximum(tl.max(tl.abs(y), axis=1), _LEAST)
    scale = top / LIMIT
    y = y * (LIMIT / top)[:, None]
    if KIND == INT8:
        codes = (y + _TO_WHOLE).to(tl.int32, bitcast=True).to(tl.int8)
        total = tl.sum(y, axis=1)
        scale = tl.where(total == total, scale, total)
    elif INTERPRETED:
        codes = tl.where(y == y, e4m3(tl.minimum(tl.maximum(y, -LIMIT), LIMIT))[0], y)
    else:
        codes = y.to(tl.float8e4nv)
    return codes, scale


@triton.jit
def rounded_scores(q, codes, codes_at, inside, KIND: tl.constexpr, DIM: tl.constexpr):
    """q . k of one tile as fp32 [rows, keys], to be multiplied by both scales; `q`: of `rounded_queries`."""
    col = tl.arange(0, q.shape[1])
    mask = inside[:, None] & (col < DIM)[None, :]
    k = tl.load(codes + (codes_at[:, None] + col[None, :]), mask=mask, other=0.0)
    if KIND == INT8:
        scores = tl.dot(q, tl.trans(k), out_dtype=tl.int32).to(tl.float32)
    elif INTERPRETED:
        scores = tl.dot(q, tl.trans(fp8_codes(k, tl.float32) * 256.0), input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(k))
    return scores
