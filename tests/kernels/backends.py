"""Every implementation of an operation that runs here, to be held to one suite of promises."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from kvq.kernels import Device, KernelSpec, registry
from kvq.kernels.native import library
from kvq.kernels.native.library import variants

_BUILT = variants()
_VARIANTS = [] if isinstance(_BUILT, str) else [x.variant for x in _BUILT]
NAMES = ["reference", *(f"cpu:{variant}" for variant in _VARIANTS), "triton"]
# For attention: the same variants with fp32 arithmetic for every format.
EXACT_NAMES = [f"cpu-fp32:{variant}" for variant in _VARIANTS if variant != "portable"]
# Sources and flags that differ little from another variant's are left to the long run.
_LATER = {"cpu:avx512", *EXACT_NAMES[1:]} if "avx512vnni" in _VARIANTS else set(EXACT_NAMES[1:])
ATTENTION = [
    pytest.param(name, marks=pytest.mark.long) if name in _LATER else name
    for name in [*NAMES[:-1], *EXACT_NAMES]
]
# Triton's interpreter takes seconds for a case; test_triton.py looks at what is its own.
ATTENTION.append(pytest.param("triton", marks=pytest.mark.daily(1)))
# A GPU to ask for; the kernels themselves run in Triton's interpreter, see tests/conftest.py.
_DEVICES = {"triton": Device(type="cuda", name="H200", capability=(9, 0))}


def every_backend(operation: str, module: dict[str, Any]) -> Any:
    """The fixture of a module whose every test holds for every implementation of an operation.

    `module`: its `globals()`, in which the operation's name becomes the implementation under test.
    """

    @pytest.fixture(autouse=True, params=NAMES, name="backend")
    def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setitem(module, operation, kernel(operation, request.param, monkeypatch))
        name: str = request.param
        return name

    return backend


def kernel(operation: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """An operation as that backend (and variant) runs it; formats that it refuses skip the test."""
    backend, _, variant = name.partition(":")
    if variant:
        chosen = next(x for x in _BUILT if x.variant == variant)
        monkeypatch.setattr(library, "load", lambda: chosen)
    found = next(k for k in registry._KERNELS if (k.operation, k.backend) == (operation, backend))

    def run(*args: Any, **options: Any) -> Any:
        kv = next((x for x in (getattr(x, "sealed", x) for x in args) if hasattr(x, "formats")), None)
        if kv is not None:
            heads = kv.k.codes.shape[1]
            spec = KernelSpec(
                formats=kv.formats,
                q_heads=heads,
                kv_heads=heads,
                block_size=kv.block_size,
                is_staged=any(getattr(x, "part", None) is not None for x in args),
            )
            support = found.supports(spec, _DEVICES.get(backend, Device(type="cpu", name="cpu")))
            if not support.yes:
                pytest.skip(f"{backend} {support.reason}")
        with warnings.catch_warnings():
            if backend == "triton":  # numpy reports what saturates on purpose
                warnings.simplefilter("ignore", RuntimeWarning)
            return found.run(*args, **options)

    return run
