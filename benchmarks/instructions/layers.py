"""The kernels between a layer's products with what a step launches them with, on a GPU that is not there."""

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from benchmarks.instructions.kernels import KV_HEADS, Q_HEADS
from kvq.kernels.gated import triton as gated
from kvq.kernels.gated.reference import Activation
from kvq.kernels.rms_norm import triton as rms_norm
from kvq.kernels.rms_norm.reference import NormWeight
from kvq.kernels.rope_write import triton as rope_write
from kvq.kernels.rope_write.reference import LayerHeads
from tests.kernels.kit import poisoned_cache

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTHS = (2560, 16_384)


class Launched(NamedTuple):
    """A kernel with its grid, arguments and launch options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]


def launches(name: str) -> Iterator[Launched]:
    """Of `add_norm`, of `gated`, or of `rope_write` for a format with its dtype and head dimension."""
    calls: dict[str, tuple[ModuleType, str, Callable[[], None]]] = {
        "add_norm": (rms_norm, "_add_norm_kernel", add_norms),
        "gated": (gated, "_gated_kernel", gates),
    }
    module, kernel, call = calls.get(name) or (rope_write, "rope_write_kernel", partial(writes, name))
    recorder = Recorder(module, kernel)
    try:
        call()
    finally:
        setattr(module, kernel, recorder.kernel)
    for launch in recorder.launches:
        yield Launched(recorder.kernel, *launch)


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
        rms_norm.AddNorm(norm)(x, torch.zeros_like(x))
        rms_norm.AddNorm(norm, post=norm, scale=0.5)(x, torch.zeros_like(x))


def gates() -> None:
    gated._launch.cache_clear()  # else one that an earlier recorder stood in for
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
