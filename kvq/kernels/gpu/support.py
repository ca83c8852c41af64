"""Support of the Triton kernels: supported formats and devices, and import of kernels at their first call."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvq.extras import install_command, is_installed
from kvq.formats import Code
from kvq.formats.ggml import GgmlType
from kvq.formats.weights import Inputs
from kvq.kernels.spec import Device, KernelSpec, LinearSpec, Support

LEAST_CAPABILITY = (8, 0)  # of NVIDIA: bf16 products and asynchronous copies
# AMD's GPUs with products of bf16 matrices, for which tests compile the kernels: Instinct, and Radeon.
AMD = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201")  # D148
MOST_DIM = 256  # elements of a token row that is read by attention
MOST_STORED_DIM = 512  # or of a row that is written and gathered, and of a latent
_AS_IT_IS = nullcontext()


def current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a GPU is current, because Triton launches on it and graphs capture it."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _AS_IT_IS
    return torch.cuda.device(device)


def lazy(module: str, operation: str) -> Callable[..., Any]:
    """Return the function `operation` of a module of kvq.kernels, imported when it is first called."""

    @cache
    def imported() -> Callable[..., Any]:
        kernel: Callable[..., Any] = getattr(import_module(f"kvq.kernels.{module}"), operation)
        return kernel

    def run(*args: Any, **options: int | Tensor | tuple[Tensor, Tensor] | None) -> Any:
        first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        blocks: Any = getattr(first, "recent", first)  # all blocks of a PagedKV, some of a StagedKV
        tensor = first if isinstance(first, Tensor) else blocks.k.codes
        with current(tensor.device):
            return imported()(*args, **options)

    return run


def supports(spec: KernelSpec, device: Device, most_dim: int = MOST_DIM) -> Support:
    """Return yes for all formats on NVIDIA GPUs from SM80 on and GPUs in `AMD`, if Triton is installed."""
    runs, fmt = supports_linear(spec, device), spec.formats
    parts = (fmt.k, fmt.k_head_dim), (fmt.v, fmt.v_head_dim)
    if runs.yes and any((x.mean or x.is_per_channel) and dim % 4 for x, dim in parts):
        return Support(False, "takes means and scales per channel of heads of a multiple of 4 elements")
    return spec.fits_compiled(most_dim) if runs.yes else runs


def supports_stored(spec: KernelSpec, device: Device) -> Support:
    """Return the result of `supports` for operations that store or gather rows."""
    return supports(spec, device, MOST_STORED_DIM)


def supports_latent(spec: KernelSpec, device: Device) -> Support:
    """Return the result of `supports` for attention over latents, which need one KV head."""
    if spec.is_staged:
        return Support(False, "attends to all latents before a query, not to a part of them")
    if spec.kv_heads != 1:
        return Support(False, f"takes latents of one KV head for all query heads, not {spec.kv_heads}")
    return supports_stored(spec, device)


def supports_8bit(spec: KernelSpec, device: Device) -> Support:  # D88
    """Like `supports`, but return no if K has 8-bit codes that tensor cores can't multiply directly."""
    runs = supports(spec, device)
    if not runs.yes:
        return runs
    if device.capability is None:
        return Support(False, f"multiplies 8-bit codes on NVIDIA GPUs, not on {device.name}")
    if spec.formats.k.code is Code.FP8 and not device.multiplies_e4m3fn:
        has = ".".join(map(str, device.capability))
        return Support(
            False,
            f"needs compute capability 8.9 for products of FP8, {device.name} has {has}; INT8 needs 8.0",
        )
    if spec.formats.k.code is Code.INT8 and spec.formats.k.rotated:
        return Support(
            False, "its products of rotated INT8 came out wrong on an H200; backend triton is right"
        )
    return runs


def supports_linear(spec: KernelSpec | LinearSpec | None, device: Device) -> Support:
    """Like `supports`, but check only the device and types of blocks; `spec` may be None."""
    fmt = spec.fmt if isinstance(spec, LinearSpec) else None
    if isinstance(fmt, GgmlType) and not (fmt.on_gpus and fmt.inputs is Inputs.FULL):
        return Support(False, f"does not multiply {fmt.name} by inputs in {fmt.inputs.value}")
    if device.capability is None and device.gfx is None:
        return Support(False, f"needs an NVIDIA or AMD GPU, not {device.name}", is_missed=False)
    if not _has_triton():
        return Support(False, f"Triton is not installed; {install_command('gpu')}")
    if device.capability is not None and device.capability < LEAST_CAPABILITY:
        has = ".".join(map(str, device.capability))
        return Support(False, f"needs compute capability 8.0, {device.name} has {has}")
    if device.gfx is not None and device.gfx not in AMD:
        takes = ", ".join(AMD)
        return Support(
            False, f"is not compiled for {device.gfx} ({device.name}); of AMD GPUs it takes {takes}"
        )
    return Support(True)


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return is_installed("triton")
