"""The kernels of a step, with what a launch on a GPU that is not there would hand them."""

from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.instructions.compiling import pretended
from kvq.formats import Code
from kvq.kernels.attend import triton as attend
from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.attend.rounding import ROUNDED
from kvq.kernels.attend.triton_kernel import attend_kernel
from kvq.kernels.attend.triton_list import list_kernel
from kvq.kernels.attend.triton_merge import merge_kernel
from kvq.kernels.gather_dense.triton import _gather_kernel
from kvq.kernels.gpu.rows import dense_strides, part_arguments
from kvq.kernels.paged import PagedKV
from kvq.kernels.write_kv.triton import _write_kernel, stored_as_bits
from tests.kernels.kit import poisoned_cache

BLOCK_SIZE = 64
Q_HEADS, KV_HEADS = 32, 8


def _arithmetics(layer: PagedKV, device: str) -> tuple[bool, ...]:
    """Whether queries are rounded to 8 bits: in some rows where that GPU has products of K's codes."""
    code = layer.formats.k.code
    can = device.startswith("sm") and (code is not Code.FP8 or int(device.removeprefix("sm")) >= 89)
    return (False, True) if can and code in ROUNDED else (False,)


def kernels(
    kv: str, dtype: torch.dtype, dims: tuple[int, int], device: str
) -> dict[str, tuple[Any, dict[str, Any], Any]]:
    """Every kernel for that format with its arguments and launch options, as `attend` would choose them."""
    cache = poisoned_cache(
        kv, [dims], kv_heads=KV_HEADS, q_heads=Q_HEADS, block_size=BLOCK_SIZE, num_blocks=2, fill=0
    )
    layer = cache.layer(0)
    q = torch.zeros(16, Q_HEADS, dims[0], dtype=dtype)
    rows = torch.zeros(16, KV_HEADS, max(dims), dtype=dtype)
    floats, ints, longs = (
        torch.zeros(16),
        torch.zeros(16, dtype=torch.int32),
        torch.zeros(16, dtype=torch.int64),
    )
    strides = dense_strides("q", q)
    gpu_q: Any = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=q.shape)
    with pretended(device):
        plans = [
            attend._planned(gpu_q, layer, AttentionOptions(scale=0.1), rounded=rounded)
            for rounded in _arithmetics(layer, device)
        ]
    common = {
        **dict.fromkeys(("lse_ptr", "sink_ptr", "parts_ptr", "part_lses_ptr"), floats),
        **dict.fromkeys(("items_ptr", "merged_ptr", "tables_ptr", "lens_ptr"), ints),
        **{"q_ptr": q, "out_ptr": q, **strides, "table_stride": 128, "height": 4},
    }
    found: dict[str, tuple[Any, dict[str, Any], Any]] = {}
    for plan in plans:
        for kind, own in zip(("decode", "extend"), plan.attend, strict=True):
            name = f"attend {kind} 8-bit" if own.fixed["K_ROUNDED"] else f"attend {kind}"
            launch = {x: own.fixed[x] for x in ("num_warps", "num_stages", "maxnreg") if x in own.fixed}
            found[name] = (attend_kernel, {**common, **own.fixed}, launch)
    for kind, own in zip(("decode", "extend"), plans[0].merge, strict=True):
        found[f"merge {kind}"] = (merge_kernel, {**common, **own.fixed}, {"num_warps": 4})
    counts = dict.fromkeys(list_kernel.arg_names[3:15], 100)
    listed = {"SHARE": 4, "ROWS": 16, "KEYS": 64, "WINDOW": True, "BLOCK": 256}
    found["list"] = (list_kernel, {**common, **counts, **listed}, {"num_warps": 4})
    written = {
        **stored_as_bits(part_arguments("k", layer), "k"),
        **stored_as_bits(part_arguments("v", layer), "v"),
        **{"k_ptr": rows, "v_ptr": rows, "slots_ptr": longs, "bad_ptr": torch.zeros(16, dtype=torch.int8)},
        **{**dense_strides("k", rows), **dense_strides("v", rows)},
        **{"BLOCK_SIZE": BLOCK_SIZE, "HEADS": KV_HEADS, "HEADS_PAD": KV_HEADS, "K_CUT": 0.0, "V_CUT": 0.01},
    }
    exact = {"num_warps": 4, "enable_fp_fusion": False}
    found["write_kv"] = (_write_kernel, written, exact)
    gathered = {
        **part_arguments("k", layer, prefix=""),
        **{"out_ptr": rows, "tables_ptr": ints, "table_stride": 128, "out_sequence": 1 << 16},
        **{"out_head": 4096, "out_token": 128, "start": 0, "end": 4096},
        **{"BLOCK_SIZE": BLOCK_SIZE, "TOKENS": 32},
    }
    found["gather_dense"] = (_gather_kernel, gathered, exact)
    return found
