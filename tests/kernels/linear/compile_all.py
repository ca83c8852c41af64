"""Compile the Linear kernels for GPUs that are not there; prints a line of JSON per kernel.

    python -m tests.kernels.linear.compile_all sm90 int4_g128:16 int4_g128:dense w8a8:128@fp16 ...

In a process of its own, as tests/kernels/gpu/compile_all.py.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.instructions.compiling import compiled, resources
from kvq.formats.weights import Inputs
from kvq.kernels import BlockWeight, QuantizedWeight
from kvq.kernels.gpu import shapes
from kvq.kernels.linear import tiles
from kvq.kernels.linear import triton as linear
from kvq.kernels.linear.tiles import LinearTile
from kvq.kernels.linear.triton_kernel import (
    add_parts_kernel,
    dequantize_kernel,
    linear_kernel,
    quantize_kernel,
)
from kvq.kernels.linear.triton_pack import Kind, kind_of, pack, pack_blocks
from tests.kernels.linear.triton_kit import BLOCKS, random_blocks, random_weight

INPUTS, OUTPUTS = 4096, 256
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def multiplies_fp8(device: str) -> bool:
    """What `Device` would say of it."""
    return device.startswith("sm") and int(device.removeprefix("sm")) >= 89


def arguments(name: str, rows: str, dtype: torch.dtype, device: str) -> tuple[Any, dict[str, Any]]:
    """The kernel that such a step runs, and what it is launched with."""
    weight: QuantizedWeight | BlockWeight
    if name in BLOCKS:
        weight = random_blocks(name, INPUTS, OUTPUTS)
        packed = pack_blocks(weight)
    else:
        weight = random_weight(name, INPUTS, OUTPUTS, dtype=dtype)
        packed = pack(weight, kind_of(weight, has_fp8=multiplies_fp8(device)))
    x = torch.zeros(1, INPUTS, dtype=dtype)
    gpu_x: Any = SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
    rounding = weight.fmt.inputs
    multiplied = x
    if rounding is Inputs.INT8:
        multiplied = x.to(torch.int8)
    elif rounding is Inputs.FP8:
        multiplied = x.to(torch.float8_e4m3fn if packed.kind is Kind.ROWS else torch.bfloat16)
    common = {
        "w_ptr": packed.codes.view(multiplied.dtype) if packed.kind is Kind.ROWS else packed.codes,
        "scale_ptr": packed.scale,
        "zero_ptr": packed.zero,
        "outputs": OUTPUTS,
        "COMPUTE": linear.compute_dtype(packed, rounding, gpu_x),
    }
    if rows == "dense":
        tile = LinearTile(rows=16, outputs=64, warps=4, stages=1, programs=1)
        return dequantize_kernel, {
            **common,
            **linear.constants(packed, tile),
            **{"out_ptr": x, "first_tile": 0, "out_row": INPUTS},
        }
    tile = tiles.fitted(packed, name, int(rows), shapes.FP32 if dtype is torch.float32 else device)
    is_split = int(rows) <= tiles.ROW_CLASSES[-1]
    return linear_kernel, {
        **common,
        **linear.constants(packed, tile),
        **{
            "x_ptr": multiplied,
            "x_scale_ptr": torch.zeros(1),
            "x_sum_ptr": torch.zeros(1, dtype=torch.float32 if name in BLOCKS else torch.int32),
        },
        **{"out_ptr": torch.zeros(1) if is_split else x, "rows": int(rows) - 2, "x_row": INPUTS},
        **{"blocks": packed.blocks, "split_blocks": 7, "groups": packed.groups},
        **{"out_split": OUTPUTS * int(rows) if is_split else 0, "BM": tile.rows},
        **{"GROUPED": packed.is_grouped, "SCALED": rounding is not Inputs.FULL},
    }


def others(dtype: torch.dtype, device: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """The kernels that don't know the weight's format."""
    floats, x = torch.zeros(1), torch.zeros(1, dtype=dtype)
    parts = {"parts_ptr": floats, "out_ptr": x, "count": 4096, "splits": 5, "WIDTH": 1024}
    rows = {"x_ptr": x, "scale_ptr": floats, "x_row": 4096, "inputs": 4096, "WIDTH": 4096}
    int8 = {"codes_ptr": x.to(torch.int8), "FP8": False, "BYTES": False}
    fp8 = {"codes_ptr": x.to(torch.uint8), "FP8": True, "BYTES": True}
    values = {"codes_ptr": x.to(torch.bfloat16), "FP8": True, "BYTES": False}
    rounding = int8, fp8 if multiplies_fp8(device) else values
    return {
        "add_parts": (add_parts_kernel, parts),
        **{f"quantize {i}": (quantize_kernel, {**rows, **kind}) for i, kind in enumerate(rounding)},
    }


def main() -> None:
    """Compile what the command line names."""
    device = sys.argv[1]
    for case in sys.argv[2:]:
        case_name, _, dtype = case.partition("@")
        name, rows = case_name.split(":")
        kernel, launch = arguments(name, rows, DTYPES[dtype or "bf16"], device)
        options = {option: launch.pop(option) for option in ("num_warps", "num_stages")}
        binary = compiled(kernel, launch, device, **options)
        ptx = binary.asm.get("ptx", "")
        counts = {"shuffles": ptx.count("shfl."), "copies": ptx.count("cp.async.cg.shared.global")}
        print(json.dumps({"kernel": case, **resources(binary), **counts}), flush=True)
    for name, (kernel, launch) in others(torch.bfloat16, device).items():
        exact = {"num_warps": 4, "enable_fp_fusion": False}
        print(json.dumps({"kernel": name, **resources(compiled(kernel, launch, device, **exact))}))


if __name__ == "__main__":
    main()
