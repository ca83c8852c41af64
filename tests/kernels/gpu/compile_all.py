"""Compile the Triton kernels for GPUs that are not there; prints a line of JSON per kernel.

    python -m tests.kernels.gpu.compile_all sm90 int4 int8 ...
    python -m tests.kernels.gpu.compile_all gfx942 int4 ...

Runs in a process of its own, since a kernel is interpreted or compiled by what the environment says
when it is imported.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvq.kernels.attend import triton as attend
from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.attend.triton_kernel import attend_kernel
from kvq.kernels.attend.triton_list import list_kernel
from kvq.kernels.attend.triton_merge import merge_kernel
from kvq.kernels.gather_dense.triton import _gather_kernel
from kvq.kernels.gpu import shapes
from kvq.kernels.gpu.rows import dense_strides, part_arguments
from kvq.kernels.write_kv.triton import _write_kernel, stored_as_bits
from tests.kernels.kit import poisoned_cache

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
LARGE = ("codes", "scales", "w_ptr")  # may take more than 2 GB, which AMD's code is specialized by
BLOCK_SIZE = 64
Q_HEADS, KV_HEADS = 32, 8


def compiled(kernel: Any, arguments: dict[str, Any], device: str, **options: Any) -> Any:
    """The kernel for `sm90` or `gfx942`, specialized as a launch with these arguments would be."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    facts: dict[tuple[int], list[list[Any]]] = {}
    for i, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = arguments[name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            is_tensor = isinstance(value, torch.Tensor)
            signature[name] = TYPES[value.dtype] if is_tensor else "i32"
            if is_tensor or value % 16 == 0:
                facts[(i,)] = [["tt.divisibility", 16]]
            if is_tensor and "gfx" in device and not name.endswith(LARGE):
                facts[(i,)] += [["tt.pointer_range", 32]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=facts)
    return triton.compile(source, target=target(device), options=options)


def target(device: str) -> GPUTarget:
    """A device by the name that the table of shapes has for it."""
    if device.startswith("sm"):
        return GPUTarget("cuda", int(device.removeprefix("sm")), 32)
    return GPUTarget("hip", device, 64 if device.startswith("gfx9") else 32)


def resources(binary: Any) -> dict[str, int]:
    """Registers and bytes of stack (spills) of a thread, and bytes of shared memory of all."""
    amd = binary.asm.get("amdgcn")
    found = _nvidia_resources(binary.asm["cubin"]) if amd is None else _amd_resources(amd)
    return {**found, "shared": binary.metadata.shared}


def _nvidia_resources(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", run.stdout)
    assert found, run.stdout
    return {"registers": int(found[1]), "stack": int(found[2])}


def _amd_resources(assembly: str) -> dict[str, int]:
    names = {"registers": "vgpr_count", "stack": "private_segment_fixed_size"}
    found = {key: re.search(rf"^ *\.{name}: +(\d+)", assembly, re.MULTILINE) for key, name in names.items()}
    # Products and sums that are one instruction, but for the five of every exact division.
    fused = len(re.findall(r"\bv_(?:pk_|dual_)?fma(?:c|mk|ak)?_f32", assembly))
    divisions = len(re.findall(r"\bv_div_fixup_f32", assembly))
    return {**{key: int(match[1]) for key, match in found.items() if match}, "fused": fused - 5 * divisions}


@contextmanager
def pretended(device: str) -> Iterator[None]:
    """Let every GPU be of that kind: there is none to ask."""
    own, shapes.device_name = shapes.device_name, lambda _: device
    try:
        yield
    finally:
        shapes.device_name = own


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
        plan = attend._planned(gpu_q, layer, AttentionOptions(scale=0.1))
    common = {
        **dict.fromkeys(("lse_ptr", "sink_ptr", "parts_ptr", "part_lses_ptr"), floats),
        **dict.fromkeys(("items_ptr", "merged_ptr", "tables_ptr", "lens_ptr"), ints),
        **{"q_ptr": q, "out_ptr": q, **strides, "table_stride": 128, "height": 4},
    }
    found: dict[str, tuple[Any, dict[str, Any], Any]] = {}
    for kind, own in zip(("decode", "extend"), plan.attend, strict=True):
        launch = {name: own.fixed[name] for name in ("num_warps", "num_stages")}
        found[f"attend {kind}"] = (attend_kernel, {**common, **own.fixed}, launch)
    for kind, own in zip(("decode", "extend"), plan.merge, strict=True):
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


def main() -> None:
    """Compile what the command line names."""
    device = sys.argv[1]
    for name in sys.argv[2:]:
        kv, _, rest = name.partition("@")  # int4@fp16,64,80: queries of fp16, K of 64, V of 80
        dtype, k_dim, v_dim = (rest or "bf16,128,128").split(",")
        torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
        for kernel, (function, arguments, options) in kernels(
            kv, torch_dtype, (int(k_dim), int(v_dim)), device
        ).items():
            used = resources(compiled(function, arguments, device, **options))
            print(json.dumps({"kv": name, "kernel": kernel, **used}), flush=True)


if __name__ == "__main__":
    main()
