"""Compile what lies between a layer's products for GPUs that are not there; prints a line of JSON per kernel.

    python -m tests.kernels.gpu.compile_layers sm90 add_norm gated int4_g64_rot@bf16,128 ...

A format with its dtype and head dimension stands for `rope_write`. In a process of its own, as compile_all.
"""

import json
import sys

from benchmarks.instructions.compiling import compiled, resources
from benchmarks.instructions.layers import launches


def main() -> None:
    """Compile what the command line names."""
    for name in sys.argv[2:]:
        for launch in launches(name):
            used = resources(compiled(launch.kernel, launch.arguments, sys.argv[1], **launch.options))
            found = {"kernel": name, "programs": launch.grid, "warps": launch.options["num_warps"], **used}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
