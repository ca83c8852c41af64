"""Compile the kernels that draw for GPUs that are not there; prints a line of JSON per kernel.

python -m tests.kernels.draw.compile_draw sm90 bf16 fp32
"""

import json
import sys
from typing import Any

import torch

from benchmarks.instructions.compiling import compiled, resources
from kvq.kernels.draw.triton import _LAUNCH
from kvq.kernels.draw.triton_rows import bins_kernel, brackets_kernel, gather_kernel, peaks_kernel
from kvq.kernels.draw.triton_search import choose_kernel, open_kernel, plan_kernel

VOCAB = 152_064
KERNELS = (peaks_kernel, brackets_kernel, open_kernel, bins_kernel, plan_kernel, gather_kernel, choose_kernel)


def arguments(kernel: Any, dtype: torch.dtype) -> dict[str, Any]:
    """As a launch over that vocabulary has them, with changed logits where the kernel tells them apart."""
    logits, longs = torch.zeros(16, dtype=dtype), torch.zeros(16, dtype=torch.int64)
    known: dict[str, Any] = {
        **{"logits_ptr": logits, "raw_ptr": logits, "numbers_ptr": torch.zeros(16, dtype=torch.float64)},
        **{"vocab": VOCAB, "row_stride": VOCAB, "raw_stride": VOCAB, "scratch_stride": 9024},
        **{"SPANS_PAD": 64, "CHANGED": True, "ALL_GREEDY": False},
    }
    return {name: known.get(name, longs) for name in kernel.arg_names}


def main() -> None:
    """Compile what the command line names."""
    for name in sys.argv[2:]:
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[name]
        for kernel in KERNELS:
            used = resources(compiled(kernel, arguments(kernel, dtype), sys.argv[1], **_LAUNCH))
            print(json.dumps({"logits": name, "kernel": kernel.__name__, **used}), flush=True)


if __name__ == "__main__":
    main()
