"""Compile the Triton kernels for GPUs that are not there; prints a line of JSON per kernel.

    python -m tests.kernels.gpu.compile_all sm90 int4 int8 ...
    python -m tests.kernels.gpu.compile_all gfx942 int4 latents:bf16/int8 ...

Runs in a process of its own, since a kernel is interpreted or compiled by what the environment says
when it is imported.
"""

import json
import sys

import torch

from benchmarks.instructions import sass
from benchmarks.instructions.compiling import compiled, disassembled, resources
from benchmarks.instructions.kernels import kernels, latent_kernels

# Kernels of formats without staged blocks, which a staged format has others for.
REPLACED = ("attend decode", "attend extend", "merge decode")


def main() -> None:
    """Compile what the command line names."""
    device = sys.argv[1]
    for name in sys.argv[2:]:
        kv, _, rest = name.partition("@")  # int4@fp16,64,80: queries of fp16, K of 64, V of 80
        dtype, k_dim, v_dim = (rest or "bf16,128,128").split(",")
        torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
        if kv.startswith("latents:"):
            found = latent_kernels(kv.removeprefix("latents:"), torch_dtype, device)
        else:
            found = kernels(kv, torch_dtype, (int(k_dim), int(v_dim)), device)
        for kernel, (function, arguments, options) in found.items():
            if kernel in REPLACED and kernel.replace(" ", " staged ") in found:
                continue
            binary = compiled(function, arguments, device, **options)
            used = resources(binary)
            if kernel.startswith("attend") and "cubin" in binary.asm:
                loop = sass.tensor_loop(sass.blocks(disassembled(binary.asm["cubin"])))
                used["spilled_in_loop"] = sass.kinds(loop).get("spill", 0) / max(len(loop), 1)
            print(json.dumps({"kv": name, "kernel": kernel, **used}), flush=True)


if __name__ == "__main__":
    main()
