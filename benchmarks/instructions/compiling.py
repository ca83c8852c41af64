"""Triton kernels compiled for GPUs that are not there, and what they take of one.

A kernel is interpreted or compiled by what the environment says when it is imported, so this runs where
TRITON_INTERPRET is not set.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvq.kernels.gpu import shapes

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint16: "*u16",
    torch.uint32: "*u32",
}
LARGE = ("codes", "scales", "w_ptr")  # may take more than 2 GB, which AMD's code is specialized by


def compiled(kernel: Any, arguments: dict[str, Any], device: str, **options: Any) -> Any:
    """The kernel for `sm90` or `gfx942`, specialized as a launch with these arguments would be."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    facts: dict[tuple[int, ...], list[list[Any]]] = {}

    def typed(name: str, value: Any, path: tuple[int, ...], *, is_constant: bool) -> Any:
        if isinstance(value, tuple):
            fields = getattr(value, "_fields", map(str, range(len(value))))
            each = enumerate(zip(fields, value, strict=True))
            own = [typed(field, x, (*path, i), is_constant=False) for i, (field, x) in each]
            return type(value)(*own) if hasattr(value, "_fields") else tuple(own)
        plain = value.value if isinstance(value, tl.constexpr) else value
        if is_constant or plain is not value or value is None or (type(value) is int and value == 1):
            constants[path] = plain
            return "constexpr"
        if isinstance(value, float):
            return "fp32"
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor or value % 16 == 0:
            facts[path] = [["tt.divisibility", 16]]
        if is_tensor and "gfx" in device and not name.endswith(LARGE):
            facts[path] += [["tt.pointer_range", 32]]
        return TYPES[value.dtype] if is_tensor else "i32"

    for i, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        signature[name] = typed(name, arguments[name], (i,), is_constant=parameter.is_constexpr)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=facts)
    return triton.compile(source, target=target(device), options=options)


def target(device: str) -> GPUTarget:
    """A device by the name that the table of shapes has for it."""
    if device.startswith("sm"):
        return GPUTarget("cuda", int(device.removeprefix("sm")), 32)
    return GPUTarget("hip", device, 64 if device.startswith("gfx9") else 32)


@contextmanager
def pretended(device: str) -> Iterator[None]:
    """Let every GPU be of that kind: there is none to ask."""
    own, shapes.device_name = shapes.device_name, lambda _: device
    try:
        yield
    finally:
        shapes.device_name = own


def resources(binary: Any) -> dict[str, int]:
    """Registers and bytes of stack (spills) of a thread, and bytes of shared memory of all."""
    amd = binary.asm.get("amdgcn")
    found = _nvidia_resources(binary.asm["cubin"]) if amd is None else _amd_resources(amd)
    return {**found, "shared": binary.metadata.shared}


def disassembled(cubin: bytes) -> str:
    """NVIDIA's machine code as text, with labels where it jumps to."""
    return _asked("nvdisasm", ["-c", "-ndf"], cubin)


def _nvidia_resources(cubin: bytes) -> dict[str, int]:
    told = _asked("cuobjdump", ["-res-usage"], cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found, told
    return {"registers": int(found[1]), "stack": int(found[2])}


def _asked(tool: str, options: list[str], cubin: bytes) -> str:
    """What a tool says that comes with Triton."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _amd_resources(assembly: str) -> dict[str, int]:
    names = {"registers": "vgpr_count", "stack": "private_segment_fixed_size"}
    found = {key: re.search(rf"^ *\.{name}: +(\d+)", assembly, re.MULTILINE) for key, name in names.items()}
    # Products and sums that are one instruction, but for the five of every exact division.
    fused = len(re.findall(r"\bv_(?:pk_|dual_)?fma(?:c|mk|ak)?_f32", assembly))
    divisions = len(re.findall(r"\bv_div_fixup_f32", assembly))
    return {**{key: int(match[1]) for key, match in found.items() if match}, "fused": fused - 5 * divisions}
