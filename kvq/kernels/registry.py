"""Kernel registry: finds the kernel for an operation by backend, or reports why none is suitable.

Backends are reference, cpu and triton. `kernels.native.library` chooses the variant of the C++ kernels.
"""

import logging
from collections.abc import Iterator
from functools import lru_cache, partial
from importlib import import_module

from kvq.errors import ConfigError, UnsupportedKernel, nearest
from kvq.kernels.cores import settle_threads
from kvq.kernels.gpu import support as gpu
from kvq.kernels.native import library
from kvq.kernels.other_threads import watch_other_threads
from kvq.kernels.spec import (
    LINEAR_OPERATIONS,
    Device,
    Kernel,
    KernelSpec,
    LinearSpec,
    Support,
    Supports,
    supported_everywhere,
)

_log = logging.getLogger("kvq")

# D87: kernels with another arithmetic form another backend, which is never `auto`
BACKENDS = ("triton", "cpu", "reference")  # `auto` tries them in this order
_WRITING = ("write_kv", "rope_write", "seal")
# Backends of another precision, which `auto` never chooses, and the backends that run operations for which
# they have no kernels: attention in fp32 arithmetic for every format, and with queries rounded to 8 bits if K
# is FP8 or INT8.
_PRECISIONS = {"cpu-fp32": "cpu", "triton-8bit": "triton"}
# Operations on blocks: support checks of their kernels in C++ (None if there are none) and in Triton. Each
# operation has a folder here, whose modules have a function of its name.
_ON_BLOCKS: dict[str, tuple[Supports | None, Supports]] = {
    "write_kv": (library.supports, gpu.supports_stored),
    "attend": (library.supports, gpu.supports),
    "merge_partials": (library.supports, gpu.supports_stored),
    "gather_dense": (library.supports, gpu.supports_stored),
    "copy_blocks": (library.supports, gpu.supports_stored),
    "seal": (library.supports, gpu.supports_stored),
    "rope_write": (None, gpu.supports),
    "attend_latent": (library.supports_latent, gpu.supports_latent),
}
_KERNELS: list[Kernel] = []


def register(kernel: Kernel) -> None:
    """Add an implementation; each operation may have only one per backend."""
    if any((k.operation, k.backend) == (kernel.operation, kernel.backend) for k in _KERNELS):
        raise ConfigError(f"{kernel.operation} already has a {kernel.backend} kernel")
    _KERNELS.append(kernel)


def _found(operation: str, backend: str) -> Kernel | None:
    for name in (backend, _PRECISIONS.get(backend)):
        for kernel in _KERNELS:
            if (kernel.operation, kernel.backend) == (operation, name):
                return kernel
    return None


def registered(backend: str) -> list[str]:
    """Return the operations on KV blocks that a backend implements."""
    names = dict.fromkeys(k.operation for k in _KERNELS if k.operation not in LINEAR_OPERATIONS)
    return [name for name in names if _found(name, backend)]


def check_backend(backend: str) -> None:
    """Raise ConfigError unless `backend` is `auto` or a known name."""
    allowed = ["auto", *BACKENDS, *_PRECISIONS]
    if backend not in allowed:
        raise ConfigError(
            f"unknown backend {backend!r}{nearest(backend, allowed) or ';'} allowed: {', '.join(allowed)}"
        )


def select(operation: str, spec: KernelSpec | LinearSpec, device: Device, backend: str = "auto") -> Kernel:
    """Return the kernel for an operation.

    The `run` of a Linear kernel takes a `QuantizedWeight` and returns a callable that multiplies by it.

    `auto` selects the first backend in `BACKENDS` that supports the spec; a backend named by the user is used
    or refused, never replaced.

    Raises:
        UnsupportedKernel: no backend is suitable; the message lists the reason for each.
    """
    check_backend(backend)
    if device.type == "cpu":
        settle_threads()
        watch_other_threads()
    is_own = isinstance(spec, KernelSpec) and bool(spec.formats.k.own or spec.formats.v.own)
    reasons: list[tuple[str, str]] = []  # (backend, why not)
    missed = False  # a kernel made for this device can't run
    for name in BACKENDS if backend == "auto" else (backend,):
        kernel = _found(operation, name)
        if kernel is None:
            reasons.append((name, f"has no {operation} kernel"))
            continue
        support = kernel.supports(spec, device)
        if is_own and operation in _WRITING and name != "reference":
            support = Support(False, "does not write registered formats", is_missed=False)
        if support.yes:
            if missed and name == "reference":
                _log_fallback(name, _listed(reasons))
            return kernel
        missed = missed or support.is_missed
        reasons.append((name, support.reason))
    raise UnsupportedKernel(
        f"no backend can run {operation} for {spec} on {device.name}: {_listed(reasons)}; "
        f"use --backend reference"
    )


def _listed(reasons: list[tuple[str, str]]) -> str:
    return "; ".join(f"{backend}: {why}" for backend, why in reasons)


@lru_cache
def _log_fallback(backend: str, reasons: str) -> None:
    _log.warning("kernels run on the %s backend (%s)", backend, reasons)


def _on_blocks(operation: str, on_cpu: Supports | None, on_gpu: Supports) -> Iterator[Kernel]:
    own = partial(Kernel, operation=operation)
    folder = f"kvq.kernels.{operation}"
    reference = getattr(import_module(f"{folder}.reference"), operation)
    yield own(backend="reference", run=reference, supports=supported_everywhere)
    if on_cpu is not None:
        compiled = getattr(import_module(f"{folder}.cpu"), operation)
        yield own(backend="cpu", run=compiled, supports=on_cpu)
        if operation.startswith("attend"):
            yield own(backend="cpu-fp32", run=partial(compiled, exact=True), supports=on_cpu)
    triton = gpu.lazy("attend.triton.attend" if operation == "attend" else f"{operation}.triton", operation)
    yield own(backend="triton", run=triton, supports=on_gpu)
    if operation == "attend":
        yield own(backend="triton-8bit", run=partial(triton, rounded=True), supports=gpu.supports_8bit)


for _operation, _supports in _ON_BLOCKS.items():
    _KERNELS += _on_blocks(_operation, *_supports)
_KERNELS += import_module("kvq.kernels.linear").KERNELS
