"""`rope_write` in Triton: one launch norms, turns and stores the heads of all new tokens."""

from typing import Any

import torch
import triton
from torch import Tensor

from kvq.kernels.gpu.arguments import part_arguments
from kvq.kernels.gpu.launch import Bound
from kvq.kernels.paged import PagedKV
from kvq.kernels.rms_norm.weight import NormWeight
from kvq.kernels.rope_write.heads import LayerHeads
from kvq.kernels.rope_write.reference import Angles, check_rope_write
from kvq.kernels.rope_write.triton_kernel import EACH, TOGETHER, rope_write_kernel
from kvq.kernels.write_kv.triton import cut_of, stored_as_bits

# A decode step waits for its slowest program, so a warp gets few elements there. A step of more tokens has
# programs enough, and 16 elements a thread take fewer instructions each than 4.
_FEW_TOKENS = 64
_FEW_ELEMENTS, _ELEMENTS = 128, 512  # of a warp
_MOST_WARPS = 8
_TENSORS = "heads_ptr", "bias_ptr", "cos_ptr", "sin_ptr", "slots_ptr", "bad_ptr"
_ROWS = "heads_row", "cos_row", "sin_row"


def rope_write(
    heads: Tensor, angles: Angles | None, kv: PagedKV, slots: Tensor, bad: Tensor, layer: LayerHeads
) -> None:
    """Do what the reference does, with the same bytes but for the last bits of norms; see there.

    Runs on the current device. Slots are not checked. Steps of up to 64 tokens may round a norm otherwise
    than longer ones; nothing depends on the other tokens of a step.
    """
    tokens = slots.shape[0]
    name = rope_write, layer, angles is None, tokens <= _FEW_TOKENS, heads.dtype
    if name not in kv.kept or heads.shape[0] < tokens:  # all steps of a layer are alike but for their rows
        check_rope_write(heads, angles, slots, bad, layer)
        kv.kept[name] = _bound(kv, layer, angles is not None, tokens)
    programs, launch = kv.kept[name]
    if not tokens:
        return
    cos, sin = (heads, heads) if angles is None else angles  # without angles pointers that are not read
    bias = heads if layer.bias is None else layer.bias
    flags = bad.view(torch.int8) if bad.dtype is torch.bool else bad
    rows = heads.stride(0), cos.stride(0), sin.stride(0)
    launch((tokens, programs, 1), (heads, bias, cos, sin, slots, flags), rows)


def _bound(kv: PagedKV, layer: LayerHeads, is_turned: bool, tokens: int) -> tuple[int, Bound]:
    """Programs of a token, and the launch but for what changes from step to step."""
    elements = _FEW_ELEMENTS if tokens <= _FEW_TOKENS else _ELEMENTS
    programs, own = _constants(kv, layer, is_turned, elements)
    return programs, Bound(rope_write_kernel, _TENSORS, _ROWS, **own)


def _constants(kv: PagedKV, layer: LayerHeads, is_turned: bool, elements: int) -> tuple[int, dict[str, Any]]:
    q_norm, k_norm = layer.norms or (None, None)
    parts = {
        **stored_as_bits(part_arguments("k", kv), "k"),
        **stored_as_bits(part_arguments("v", kv), "v"),
        **_of_norm("q", q_norm, kv, layer.k_dim),
        **_of_norm("k", k_norm, kv, layer.k_dim),
        **_of_center("k", layer.centers[0], kv),
        **_of_center("v", layer.centers[1], kv),
        "K_CUT": cut_of(kv.formats.k, kv.formats.k_clip),
        "V_CUT": cut_of(kv.formats.v, kv.formats.v_clip),
        "Q_HEADS": layer.q_heads,
        "KV_HEADS": layer.kv_heads,
        "BIAS": layer.bias is not None,
        "ROTARY": layer.rotary_dim if is_turned else 0,
        "PAIRS": int(layer.pairs),
        "BLOCK_SIZE": kv.block_size,
        "enable_fp_fusion": False,  # a product and a sum rounded once would change codes
    }
    parts |= _tiles(parts, elements)
    is_q_changed = parts["ROTARY"] or parts["Q_NORM"] or parts["BIAS"]
    q_tiles = triton.cdiv(layer.q_heads, parts["Q_TILE"]) if is_q_changed else 0
    return parts["K_TILES"] + parts["V_TILES"] + q_tiles, parts


def _of_norm(name: str, norm: NormWeight | None, kv: PagedKV, dim: int) -> dict[str, Any]:
    kind = EACH if norm is not None and norm.weight.shape == (dim,) else TOGETHER
    return {
        f"{name}_norm": kv.k.codes if norm is None else norm.weight,  # or a pointer that is not read
        f"{name}_eps": 0.0 if norm is None else norm.eps,
        f"{name.upper()}_NORM": 0 if norm is None else int(kind.value),
    }


def _of_center(name: str, center: Tensor | None, kv: PagedKV) -> dict[str, Any]:
    return {
        f"{name}_center": kv.k.codes if center is None else center,
        f"{name.upper()}_CENTERED": center is not None,
    }


def _tiles(parts: dict[str, Any], elements: int) -> dict[str, int]:
    """Heads of one program, and its warps.

    Heads that are normed together are one program's: another would write some of them meanwhile.
    """
    of_heads = {"Q": ("Q_HEADS", "K_PAD"), "K": ("KV_HEADS", "K_PAD"), "V": ("KV_HEADS", "V_PAD")}
    most = {name: triton.next_power_of_2(parts[heads]) for name, (heads, _) in of_heads.items()}
    whole = [name for name in "QK" if parts[f"{name}_NORM"] == TOGETHER.value]
    largest = max((most[name] * parts["K_PAD"] for name in whole), default=elements)
    warps = min(max(1, largest // elements), _MOST_WARPS)
    tiles = {
        name: most[name] if name in whole else min(max(1, warps * elements // parts[pad]), most[name])
        for name, (_, pad) in of_heads.items()
    }
    return {
        **{f"{name}_TILE": tile for name, tile in tiles.items()},
        **{f"{name}_TILES": triton.cdiv(parts["KV_HEADS"], tiles[name]) for name in "KV"},
        "num_warps": warps,
    }
