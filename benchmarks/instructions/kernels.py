"""The kernels of a step, with what a launch on a GPU that is not there would hand them."""

from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.instructions.compiling import pretended
from kvq.formats import Code
from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.attend.reference import limit_of
from kvq.kernels.attend.triton import attend
from kvq.kernels.attend.triton.kernel import attend_kernel
from kvq.kernels.attend.triton.list_kernel import list_kernel
from kvq.kernels.attend.triton.results import merge_kernel
from kvq.kernels.attend.triton.step import Plan
from kvq.kernels.attend_latent import triton as latent
from kvq.kernels.attend_latent.triton_kernel import latent_kernel
from kvq.kernels.gather_dense.triton import _gather_kernel
from kvq.kernels.gpu.launch import kernel_rows, written_rows
from kvq.kernels.paged import PagedKV
from kvq.kernels.seal import triton as seal
from kvq.kernels.write_kv.triton import _write_kernel
from tests.kernels.kit import poisoned_cache

BLOCK_SIZE = 64
Q_HEADS, KV_HEADS = 32, 8
LATENT = (64, 512)  # elements of a token's rotary part and of its latent
LATENT_HEADS = 128


def dense_strides(name: str, x: torch.Tensor) -> dict[str, int]:
    """Return the strides of [tokens, heads, dim], in elements, keyed by argument name."""
    return dict(zip((f"{name}_token", f"{name}_head", f"{name}_dim"), x.stride(), strict=True))


def latent_kernels(kv: str, dtype: torch.dtype, device: str) -> dict[str, tuple[Any, dict[str, Any], Any]]:
    """Those of `attend_latent`, with the heads of DeepSeek V3."""
    cache = poisoned_cache(
        kv, [LATENT], kv_heads=1, q_heads=LATENT_HEADS, block_size=BLOCK_SIZE, num_blocks=2, fill=0
    )
    q = torch.zeros(16, LATENT_HEADS, sum(LATENT), dtype=dtype)
    with pretended(device):
        plan = latent._planned(_on_gpu(q), cache.layer(0), AttentionOptions(scale=0.1))
    return _of_plan("attend_latent", latent_kernel, plan, q)


def _arithmetics(layer: PagedKV, device: str) -> tuple[bool, ...]:
    """Whether queries are rounded to 8 bits: in some rows where that GPU has products of K's codes."""
    code = layer.formats.k.code
    can = device.startswith("sm") and (code is not Code.FP8 or int(device.removeprefix("sm")) >= 89)
    return (False, True) if can and limit_of(layer.formats.k) is not None else (False,)


def _on_gpu(q: torch.Tensor) -> Any:
    return SimpleNamespace(device=torch.device("cuda"), dtype=q.dtype, shape=q.shape)


def _given(q: torch.Tensor) -> dict[str, Any]:
    """What varies from step to step."""
    return {
        **dict.fromkeys(("lse_ptr", "sink_ptr", "parts_ptr", "part_lses_ptr", "room_ptr"), torch.zeros(16)),
        **dict.fromkeys(
            ("items_ptr", "merged_ptr", "tables_ptr", "recent_tables_ptr", "sinks_tables_ptr", "lens_ptr"),
            torch.zeros(16, dtype=torch.int32),
        ),
        **{"q_ptr": q, "out_ptr": q, **dense_strides("q", q), "table_stride": 128, "height": 4},
        **{"recent_stride": 128, "sinks_stride": 128},
    }


def _of_plan(
    name: str, kernel: Any, plan: Plan, q: torch.Tensor
) -> dict[str, tuple[Any, dict[str, Any], Any]]:
    found: dict[str, tuple[Any, dict[str, Any], Any]] = {}
    for kind, own in zip(("decode", "extend"), plan.attend, strict=True):
        launch = {x: own.fixed[x] for x in ("num_warps", "num_stages", "maxnreg") if x in own.fixed}
        rounded = " 8-bit" if own.fixed["k"].read.rounded.value else ""
        found[f"{name} {kind}{rounded}"] = (kernel, {**_given(q), **own.fixed}, launch)
    return found


def kernels(
    kv: str,
    dtype: torch.dtype,
    dims: tuple[int, int],
    device: str,
    *,
    block_size: int = BLOCK_SIZE,
    q_heads: int = Q_HEADS,
) -> dict[str, tuple[Any, dict[str, Any], Any]]:
    """Every kernel for that format with its arguments and launch options, as `attend` would choose them."""
    cache = poisoned_cache(
        kv, [dims], kv_heads=KV_HEADS, q_heads=q_heads, block_size=block_size, num_blocks=2, fill=0
    )
    layer = cache.layer(0)
    q = torch.zeros(16, q_heads, dims[0], dtype=dtype)
    rows = torch.zeros(16, KV_HEADS, max(dims), dtype=dtype)
    common, ints, longs = _given(q), torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int64)
    with pretended(device):
        plans = [
            attend._planned(_on_gpu(q), layer, AttentionOptions(scale=0.1), rounded=rounded)
            for rounded in _arithmetics(layer, device)
        ]
    found = {}
    for plan in plans:
        found |= _of_plan("attend", attend_kernel, plan, q)
    for kind, own in zip(("decode", "extend"), plans[0].merge, strict=True):
        found[f"merge {kind}"] = (merge_kernel, {**common, **own.fixed}, {"num_warps": 4})
    counts = dict.fromkeys(list_kernel.arg_names[3 : list_kernel.arg_names.index("SHARE")], 100)
    listed = {
        "SHARE": 4,
        "ROWS": 16,
        "KEYS": 64,
        "WINDOW": True,
        "CHUNK": 0,
        "AGE": 0,
        "AGE_BLOCK": 1,
        "FIXED": 0,
    }
    found["list"] = (list_kernel, {**common, **counts, **listed, "BLOCK": 256}, {"num_warps": 4})
    if cache.layout.recipe.is_staged:
        with pretended(device):
            together = attend._planned_staged(_on_gpu(q), cache.stores[0].kv, AttentionOptions(scale=0.1))
        found |= _of_plan("attend staged", attend_kernel, together, q)
        found["merge staged decode"] = (merge_kernel, {**common, **together.merge[0].fixed}, {"num_warps": 4})
        tables = dict.fromkeys(("recent_tables", "sealed_tables", "sinks_tables"), ints)
        strides = dict.fromkeys(("lens_row", "recent_stride", "sealed_stride", "sinks_stride"), 100)
        sealed = {**common, **tables, **strides, **seal._arguments(cache.stores[0].kv)}
        found["seal"] = (seal._seal_kernel, sealed, {"num_warps": 4, "enable_fp_fusion": False})
    written = {
        **{"k_ptr": rows, "v_ptr": rows, "slots_ptr": longs, "bad_ptr": torch.zeros(16, dtype=torch.int8)},
        **{**dense_strides("k", rows), **dense_strides("v", rows)},
        **{"k_rows": written_rows("k", layer).argument(), "v_rows": written_rows("v", layer).argument()},
        **{"BLOCK_SIZE": block_size, "HEADS": KV_HEADS, "HEADS_PAD": KV_HEADS},
    }
    exact = {"num_warps": 4, "enable_fp_fusion": False}
    found["write_kv"] = (_write_kernel, written, exact)
    gathered = {
        "rows": kernel_rows("k", layer).argument(),
        **{"out_ptr": rows, "tables_ptr": ints, "table_stride": 128, "out_sequence": 1 << 16},
        **{"out_head": 4096, "out_token": 128, "start": 0, "end": 4096},
        **{"BLOCK_SIZE": block_size, "TOKENS": 32},
    }
    found["gather_dense"] = (_gather_kernel, gathered, exact)
    return found
