"""`rope_write` in Triton: one launch applies norms and RoPE to all new tokens' heads and stores them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels.gpu.launch import Bound, written_rows
from kvq.kernels.paged import PagedKV
from kvq.kernels.rms_norm.reference import NormWeight
from kvq.kernels.rope_write.reference import Angles, LayerHeads, check_rope_write
from kvq.kernels.rope_write.triton_kernel import rope_write_kernel

# A decode step waits for its slowest program, so a warp gets few elements there. A step of more tokens has
# enough programs, and 16 elements per thread take fewer instructions each than 4.
_FEW_TOKENS = 64
_FEW_ELEMENTS, _ELEMENTS = 128, 512  # of a warp
_MOST_WARPS = 8
_TENSORS = "heads_ptr", "bias_ptr", "cos_ptr", "sin_ptr", "slots_ptr", "bad_ptr"
_ROWS = "heads_row", "cos_row", "sin_row"
_COUNTS = "Q_HEADS", "KV_HEADS", "Q_TILE", "K_TILE", "V_TILE", "K_TILES", "V_TILES"


class _Norm(NamedTuple):
    """An RMS norm of heads, as a kernel argument."""

    weight: Tensor
    eps: float
    together: Any  # constant: whether it is taken over all heads at once, or over each


def rope_write(  # D144: keys turned on the way; `write_kv` stays
    heads: Tensor, angles: Angles | None, kv: PagedKV, slots: Tensor, bad: Tensor, layer: LayerHeads
) -> None:
    """Do what the reference does, byte for byte except for the last bits of norms; see reference.py.

    Runs on the current device. Slots are not checked. Steps of up to 64 tokens may round a norm differently
    from longer steps; otherwise, a token's results don't depend on the other tokens of a step.
    """
    tokens = slots.shape[0]
    name = rope_write, layer, angles is None, tokens <= _FEW_TOKENS, heads.dtype
    if name not in kv.kept or heads.shape[0] < tokens:  # all steps of a layer differ only in their rows
        check_rope_write(heads, angles, slots, bad, layer)
        kv.kept[name] = _bound(kv, layer, angles is not None, tokens)
    programs, launch = kv.kept[name]
    if not tokens:
        return
    cos, sin = (heads, heads) if angles is None else angles  # without angles, these pointers are not read
    bias = heads if layer.bias is None else layer.bias
    flags = bad.view(torch.int8) if bad.dtype is torch.bool else bad
    rows = heads.stride(0), cos.stride(0), sin.stride(0)
    launch((tokens, programs, 1), (heads, bias, cos, sin, slots, flags), rows)


def _bound(kv: PagedKV, layer: LayerHeads, is_turned: bool, tokens: int) -> tuple[int, Bound]:
    """Return the number of programs per token, and the launch without per-step arguments."""
    elements = _FEW_ELEMENTS if tokens <= _FEW_TOKENS else _ELEMENTS
    programs, own = _constants(kv, layer, is_turned, elements)
    return programs, Bound(rope_write_kernel, _TENSORS, _ROWS, own)


def _constants(kv: PagedKV, layer: LayerHeads, is_turned: bool, elements: int) -> tuple[int, dict[str, Any]]:
    k, v = written_rows("k", kv), written_rows("v", kv)
    q_norm, k_norm = (_norm(norm, layer.k_dim) for norm in layer.norms or (None, None))
    rotary = layer.rotary_dim if is_turned else 0
    together = [norm is not None and norm.together for norm in (q_norm, k_norm, None)]
    tiles, warps = _tiles(layer, together, (k.pad, k.pad, v.pad), elements)
    q_tiles, k_tiles, v_tiles = map(triton.cdiv, layer.counts, tiles)
    counts = layer.q_heads, layer.kv_heads, *tiles, k_tiles, v_tiles
    is_q_changed = rotary or q_norm is not None or layer.bias is not None
    programs = k_tiles + v_tiles + (q_tiles if is_q_changed else 0)
    return programs, {
        **{"k": k.argument(), "v": v.argument()},
        "q_norm": q_norm and q_norm._replace(together=tl.constexpr(q_norm.together)),
        "k_norm": k_norm and k_norm._replace(together=tl.constexpr(k_norm.together)),
        **dict(zip(("k_center", "v_center"), layer.centers, strict=True)),
        **dict(zip(_COUNTS, counts, strict=True)),
        **{"BIAS": layer.bias is not None, "ROTARY": rotary, "PAIRS": int(layer.pairs)},
        "BLOCK_SIZE": kv.block_size,
        "enable_fp_fusion": False,  # a product and a sum rounded once would change codes
        "num_warps": warps,
    }


def _norm(norm: NormWeight | None, dim: int) -> _Norm | None:
    return None if norm is None else _Norm(norm.weight, norm.eps, norm.weight.shape != (dim,))


def _tiles(
    layer: LayerHeads, together: Sequence[bool], columns: Sequence[int], elements: int
) -> tuple[tuple[int, ...], int]:
    """Return the numbers of query, K and V heads per program, and the number of warps.

    Heads that are normalized together are in one program, since another program could overwrite some of them.
    """
    heads = [triton.next_power_of_2(count) for count in layer.counts]
    rows = list(zip(heads, columns, together, strict=True))
    largest = max((count * pad for count, pad, is_whole in rows if is_whole), default=elements)
    warps = min(max(1, largest // elements), _MOST_WARPS)
    tiles = (
        count if is_whole else min(max(1, warps * elements // pad), count) for count, pad, is_whole in rows
    )
    return tuple(tiles), warps
