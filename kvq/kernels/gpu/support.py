"""Which formats and devices the Triton kernels take, and the kernels themselves, imported when asked for."""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvq.extras import install_command, is_installed
from kvq.kernels.linear.weight import QuantizedWeight
from kvq.kernels.spec import Device, KernelSpec, LinearSpec, Support

LEAST_CAPABILITY = (8, 0)  # bf16 products and asynchronous copies
MOST_DIM = 256  # elements of a token row


def lazy(operation: str) -> Callable[..., Any]:
    """The operation's kernel, which imports Triton when it is first called."""

    def run(*args: Any, **options: int | Tensor | tuple[Tensor, Tensor] | None) -> Any:
        first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        tensor = first if isinstance(first, Tensor) else first.k.codes  # of PagedKV
        if tensor.device.type != "cuda":
            return _kernel(operation)(*args, **options)
        with torch.cuda.device(tensor.device):  # Triton launches on the current device
            return _kernel(operation)(*args, **options)

    return run


def lazy_linear(weight: QuantizedWeight) -> Any:
    """The kernel of a quantized Linear layer; imports Triton."""
    return import_module("kvq.kernels.linear.triton").TritonLinear(weight)


def supports(spec: KernelSpec, device: Device) -> Support:
    """Yes for NVIDIA GPUs from SM80 on and all formats, if Triton is installed."""
    runs = supports_linear(spec, device)
    return spec.fits_compiled(MOST_DIM) if runs.yes else runs


def supports_linear(spec: KernelSpec | LinearSpec | None, device: Device) -> Support:
    """The same; every format and shape, and what has none."""
    if device.type != "cuda" or device.capability is None:
        return Support(False, f"needs an NVIDIA GPU, not {device.name}", is_missed=False)
    if not _has_triton():
        return Support(False, f"Triton is not installed; {install_command('gpu')}")
    if device.capability < LEAST_CAPABILITY:
        has = ".".join(map(str, device.capability))
        return Support(False, f"needs compute capability 8.0, {device.name} has {has}")
    return Support(True)


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return is_installed("triton")


@lru_cache(maxsize=16)
def _kernel(operation: str) -> Callable[..., Any]:
    kernel: Callable[..., Any] = getattr(import_module(f"kvq.kernels.{operation}.triton"), operation)
    return kernel
