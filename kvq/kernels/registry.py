"""Which kernel runs an operation: asked by backend name, answered with a kernel or every reason."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

from kvq.errors import ConfigError, UnsupportedKernel, nearest
from kvq.kernels.cores import settle_threads
from kvq.kernels.gpu import support as gpu
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.linear.reference import ReferenceLinear
from kvq.kernels.native import library
from kvq.kernels.neighbours import watch_neighbours
from kvq.kernels.spec import LINEAR_OPERATIONS, Device, KernelSpec, LinearSpec, Support

_log = logging.getLogger("kvq")

BACKENDS = ("triton", "cpu", "reference")  # `auto` tries them in this order
_WRITING = ("write_kv", "rope_write", "seal")
# What `auto` never takes. Attention in fp32 arithmetic for every format; and with queries rounded to 8 bits
# over K of FP8 and INT8.
NAMED_BACKENDS = ("cpu-fp32", "triton-8bit")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One implementation of one operation."""

    operation: str
    backend: str
    run: Callable[..., Any]
    supports: Callable[[Any, Device], Support]  # of a KernelSpec; of a LinearSpec for Linear layers

    @property
    def is_triton(self) -> bool:
        """Whether it is one of the GPU kernels."""
        return self.backend.startswith("triton")


def supported_everywhere(spec: KernelSpec | LinearSpec, device: Device) -> Support:
    """The reference runs every format on every device: bytes are storage, decoded by arithmetic."""
    return Support(True)


def _function(operation: str, backend: str) -> Callable[..., Any]:
    """An operation on blocks lies in the file of its backend, in a folder of its own."""
    function: Callable[..., Any] = getattr(import_module(f"kvq.kernels.{operation}.{backend}"), operation)
    return function


def _kernels() -> Iterator[Kernel]:
    """What kvq itself brings."""
    supports: Callable[[Any, Device], Support]
    for name in ("write_kv", "attend", "merge_partials", "gather_dense", "copy_blocks"):
        cpu, triton = _function(name, "cpu"), gpu.lazy(name)
        exact, rounded, fits = cpu, triton, gpu.supports_stored
        if name == "attend":
            exact, rounded = partial(cpu, exact=True), partial(triton, rounded=True)
            fits = gpu.supports
        for backend, run, supports in (
            ("reference", _function(name, "reference"), supported_everywhere),
            ("cpu", cpu, library.supports),
            ("cpu-fp32", exact, library.supports),
            ("triton", triton, fits),
            ("triton-8bit", rounded, gpu.supports_8bit),
        ):
            yield Kernel(operation=name, backend=backend, run=run, supports=supports)
    for name, backends in (
        (
            "seal",
            {
                **dict.fromkeys(("cpu", "cpu-fp32"), library.supports),
                **dict.fromkeys(("triton", "triton-8bit"), gpu.supports_stored),
            },
        ),
        ("rope_write", {"triton": gpu.supports, "triton-8bit": gpu.supports_8bit}),
        (
            "attend_latent",
            {
                **dict.fromkeys(("cpu", "cpu-fp32"), library.supports_latent),
                **dict.fromkeys(("triton", "triton-8bit"), gpu.supports_latent),
            },
        ),
    ):
        reference = _function(name, "reference")
        yield Kernel(operation=name, backend="reference", run=reference, supports=supported_everywhere)
        for backend, supports in backends.items():
            run = _function(name, "cpu") if backend.startswith("cpu") else gpu.lazy(name)
            if (name, backend) == ("attend_latent", "cpu-fp32"):
                run = partial(run, exact=True)
            yield Kernel(operation=name, backend=backend, run=run, supports=supports)
    for name in LINEAR_OPERATIONS:
        for backend, run, supports in (
            ("reference", ReferenceLinear, supported_everywhere),
            ("cpu", CpuLinear, library.supports_linear),
            ("cpu-fp32", ReferenceLinear, supported_everywhere),
            ("triton", gpu.lazy_linear, gpu.supports_linear),
            ("triton-8bit", gpu.lazy_linear, gpu.supports_linear),
        ):
            yield Kernel(operation=name, backend=backend, run=run, supports=supports)


_KERNELS = list(_kernels())


def register(kernel: Kernel) -> None:
    """Add an implementation; one per operation and backend."""
    if any((k.operation, k.backend) == (kernel.operation, kernel.backend) for k in _KERNELS):
        raise ConfigError(f"{kernel.operation} already has a {kernel.backend} kernel")
    _KERNELS.append(kernel)


def registered(backend: str) -> list[str]:
    """The operations on blocks of KV that a backend implements."""
    own = (k.operation for k in _KERNELS if k.backend == backend)
    return [name for name in own if name not in LINEAR_OPERATIONS]


def check_backend(backend: str) -> None:
    """Raise ConfigError unless `backend` is `auto` or a known name."""
    allowed = ["auto", *BACKENDS, *NAMED_BACKENDS]
    if backend not in allowed:
        raise ConfigError(
            f"unknown backend {backend!r}{nearest(backend, allowed) or ';'} allowed: {', '.join(allowed)}"
        )


def select(operation: str, spec: KernelSpec | LinearSpec, device: Device, backend: str = "auto") -> Kernel:
    """Return the kernel for an operation.

    A Linear kernel's `run` takes a `QuantizedWeight` once and returns what multiplies by it.

    `auto` takes the first backend of `BACKENDS` that supports the spec; a backend that the user
    names is used or refused, never replaced.

    Raises:
        UnsupportedKernel: nothing fits; the message lists every backend's reason.
    """
    check_backend(backend)
    if device.type == "cpu":
        settle_threads()
        watch_neighbours()
    is_own = isinstance(spec, KernelSpec) and bool(spec.formats.k.own or spec.formats.v.own)
    reasons: list[tuple[str, str]] = []  # (backend, why not)
    missed = False  # a kernel made for this device can't run
    for name in BACKENDS if backend == "auto" else (backend,):
        kernel = next((k for k in _KERNELS if (k.operation, k.backend) == (operation, name)), None)
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
