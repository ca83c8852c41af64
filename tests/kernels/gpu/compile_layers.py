"""Compile what lies between a layer's products for GPUs that are not there; prints a line of JSON per kernel.

    python -m tests.kernels.gpu.compile_layers sm90 add_norm gated int4_g64_rot@bf16,128 ...

A format with its dtype and head dimension stands for `rope_write`. In a process of its own, as compile_all.
"""

import json
import sys
from types import ModuleType
from typing import Any

import torch

from kvq.kernels.gated import triton as gated
from kvq.kernels.gated.activation import Activation
from kvq.kernels.rms_norm import triton as rms_norm
from kvq.kernels.rms_norm.weight import NormWeight
from kvq.kernels.rope_write import triton as rope_write
from kvq.kernels.rope_write.heads import LayerHeads
from tests.kernels.gpu.compile_all import compiled, resources
from tests.kernels.kit import poisoned_cache

Q_HEADS, KV_HEADS = 32, 8
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTHS = (2560, 16_384)


class Recorder:
    """Stands in a kernel's place and keeps what it is launched with."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self.kernel = getattr(module, name)
        self.arg_names = self.kernel.arg_names
        self.launches: list[tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = []
        setattr(module, name, self)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**named: Any) -> None:
            options = {key: named.pop(key) for key in set(named) - set(self.arg_names)}
            self.launches.append((grid, named, options))

        return launch


def add_norms() -> None:
    """With and without a norm before the sum, at a usual width and at the widest that fits into registers."""
    for dim in WIDTHS:
        x, own = torch.zeros(64, dim, dtype=torch.bfloat16), torch.ones(dim, dtype=torch.bfloat16)
        norm = NormWeight(weight=own, eps=1e-6)
        rms_norm.add_norm(x, torch.zeros_like(x), norm)
        rms_norm.add_norm(x, torch.zeros_like(x), norm, post=norm, scale=0.5)


def gates() -> None:
    for activation in Activation:
        gated.gated(torch.zeros(64, 6144, dtype=torch.bfloat16), activation)


def writes(name: str) -> None:
    """Head norms in a short and in a long step, a bias and centers, norms of all heads at once."""
    kv, _, rest = name.partition("@")
    dtype_name, dim_name = (rest or "bf16,128").split(",")
    dtype, dim = DTYPES[dtype_name], int(dim_name)
    cache = poisoned_cache(
        kv, [(dim, dim)], kv_heads=KV_HEADS, q_heads=Q_HEADS, block_size=64, num_blocks=2, fill=0
    )
    sizes: dict[str, Any] = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "k_dim": dim, "v_dim": dim}
    norm = NormWeight(weight=torch.ones(dim, dtype=dtype), eps=1e-6)
    together = [NormWeight(weight=torch.ones(n * dim, dtype=dtype), eps=1e-6) for n in (Q_HEADS, KV_HEADS)]
    width = LayerHeads(**sizes).width
    centers = (torch.zeros(KV_HEADS, dim),) * 2
    for tokens, options in (
        (64, {"norms": (norm, norm)}),
        (256, {"norms": (norm, norm)}),
        (64, {"bias": torch.zeros(width, dtype=dtype), "centers": centers}),
        (64, {"norms": tuple(together)}),
    ):
        layer = LayerHeads(**sizes, rotary_dim=dim, **options)
        heads, angles = torch.zeros(tokens, width, dtype=dtype), torch.zeros(tokens, dim, dtype=dtype)
        slots, bad = torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, dtype=torch.bool)
        rope_write.rope_write(heads, (angles, angles), cache.layer(0), slots, bad, layer)


def main() -> None:
    """Compile what the command line names."""
    for name in sys.argv[2:]:
        module, kernel, call = {
            "add_norm": (rms_norm, "_add_norm_kernel", add_norms),
            "gated": (gated, "_gated_kernel", gates),
        }.get(name, (rope_write, "rope_write_kernel", lambda name=name: writes(name)))
        recorder = Recorder(module, kernel)
        call()
        for grid, arguments, options in recorder.launches:
            used = resources(compiled(recorder.kernel, arguments, sys.argv[1], **options))
            found = {"kernel": name, "programs": grid, "warps": options["num_warps"], **used}
            print(json.dumps(found), flush=True)
        setattr(module, kernel, recorder.kernel)


if __name__ == "__main__":
    main()
