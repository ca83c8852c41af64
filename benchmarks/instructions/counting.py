"""One kernel compiled and counted: a row of the table."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.compiler.errors import CompilationError

from benchmarks.instructions import layers, sass
from benchmarks.instructions.cards import MULTIPROCESSORS, slots
from benchmarks.instructions.compiling import compiled, disassembled, resources
from benchmarks.instructions.copies import copies
from benchmarks.instructions.kernels import KV_HEADS, LATENT, kernels, latent_kernels
from kvq.formats import KVRecipe
from tests.kernels.linear import compile_all as linear

DIM = 128
# Of a loop's instructions, those that may be spills. INT4 with 0.5% and 12 programs at once was faster on an
# H200 than with none and 8; its extends have 1.3% with Triton 3.7.1, or a quarter more instructions a key in
# tiles of 32 keys.
SPILLED = 0.015  # D134: a loop may spill 1.5%
LATENTS = ("bf16", "bf16/fp8", "bf16/int8", "bf16/int4_g64")  # rotary parts and latents
LINEAR = ("int4_g128", "int8", "w8a8", "fp8_a8", "w4a8", "Q4_0", "Q8_0", "Q4_K", "Q6_K")


class Asked(NamedTuple):
    """A kernel to compile for a device."""

    kv: str  # the KV format, or that of weights; empty where there is none
    name: str
    device: str
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    dims: tuple[int, int] = (DIM, DIM)  # of a token's K and V


def of_format(kv: str, device: str) -> Iterator[Asked]:
    """Attention, and what writes and reads blocks: bf16 queries, 32 and 8 heads of dimension 128."""
    for name, found in kernels(kv, torch.bfloat16, (DIM, DIM), device).items():
        yield Asked(kv, name, device, *found)
    for i, launch in enumerate(layers.launches(f"{kv}@bf16,{DIM}")):
        yield Asked(kv, f"rope_write {i}", device, launch.kernel, launch.arguments, launch.options)


def of_any_format(device: str) -> Iterator[Asked]:
    """What lies between a layer's products, attention over latents, and products over quantized weights."""
    for name in ("add_norm", "gated"):
        for i, launch in enumerate(layers.launches(name)):
            yield Asked("", f"{name} {i}", device, launch.kernel, launch.arguments, launch.options)
    for kv in LATENTS:
        for name, found in latent_kernels(kv, torch.bfloat16, device).items():
            yield Asked(kv, name, device, *found, dims=LATENT)
    for weights in LINEAR:
        kernel, launched = linear.arguments(weights, "16", torch.bfloat16, device)
        options = {name: launched.pop(name) for name in ("num_warps", "num_stages")}
        yield Asked(weights, "linear", device, kernel, launched, options)


def of_shares(device: str) -> Iterator[Asked]:
    """Decode by the query heads that share a KV head."""
    for kv in ("bf16", "int4_g64"):
        for share in (1, 2, 4, 8, 16):
            found = kernels(kv, torch.bfloat16, (DIM, DIM), device, q_heads=share * KV_HEADS)
            yield Asked(kv, f"attend decode, {share} heads", device, *found["attend decode"])


def counted(asked: Asked) -> dict[str, Any]:
    """Its row; with `error` instead of figures where the compiler fails."""
    row: dict[str, Any] = {"kv": asked.kv, "kernel": asked.name, "device": asked.device}
    row |= {"triton": triton.__version__}
    try:
        with _unheard() as heard:
            binary = compiled(asked.kernel, asked.arguments, asked.device, **asked.options)
    except (CompilationError, RuntimeError) as error:
        told = [line for line in heard.read_text(errors="replace").splitlines() if "error:" in line]
        return row | {"error": (told or str(error).splitlines() or [repr(error)])[0][:200]}
    finally:
        heard.unlink(missing_ok=True)
    return row | figures(asked, binary)


def figures(asked: Asked, binary: Any) -> dict[str, Any]:
    """Instructions, registers, memory and copies of what was compiled."""
    used, warps = resources(binary), binary.metadata.num_warps
    code = sass.blocks(sass_text := disassembled(binary.asm["cubin"]))
    assert any(block.instructions for block in code), f"no instruction is read from {sass_text[:200]!r}"
    loop, keys = sass.tensor_loop(code), asked.arguments.get("KEYS")
    names = loop or sass.all_names(code)
    of_loop = copies(binary.asm["ttgir"])
    found = {
        **{"warps": warps, "stages": binary.metadata.num_stages, **used},
        "programs_at_once": MULTIPROCESSORS[asked.device].programs_at_once(
            warps=warps, registers=used["registers"], shared=used["shared"]
        ),
        "instructions": len(sass.all_names(code)),
        "loop_instructions": len(loop),
        "kinds": sass.kinds(names),
        "loads": sass.loads(names),
        **{"buffers": of_loop.buffers, "waits": of_loop.waits, "copy_groups": of_loop.groups},
        **{"tiles_under_way": of_loop.tiles, "awaited_loads": of_loop.awaited_loads},
    }
    if loop and keys:
        size = key_bytes(asked.kv, asked.dims)
        found |= {"rows": asked.arguments["ROWS"], "keys": keys, "key_bytes": size}
        found |= {
            "instructions_a_key": round(len(loop) * warps / keys, 1),
            "slots_a_key": slots(asked.device, size),
        }
        found |= dict(zip(("prologue", "epilogue"), map(len, sass.around(code)), strict=True))
    return found


def key_bytes(kv: str, dims: tuple[int, int]) -> int:
    """Codes and scales of a token's K and V of one head."""
    formats = KVRecipe.uniform(kv, [dims]).layers[0]
    parts = zip((formats.k, formats.v), dims, strict=True)
    return sum(part.code_bytes(dim) + part.scale_bytes(dim) for part, dim in parts)


@contextmanager
def _unheard() -> Iterator[Path]:
    """Keep what the compiler writes to stderr (a whole module where it fails) in a file for the caller."""
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.NamedTemporaryFile(delete=False) as file:
        os.dup2(file.fileno(), 2)
        try:
            yield Path(file.name)
        finally:
            os.dup2(own, 2)
            os.close(own)
