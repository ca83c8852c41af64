"""Models made as on an H200, on a CPU: for tests that interpret their kernels, and to time the host."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from kvq.kernels import Device

H200 = Device(type="cuda", name="H200", capability=(9, 0))


class _Hopper(Device):
    """Every device is one."""

    @classmethod
    def of(cls, device: Any) -> Device:
        return H200


@contextmanager
def as_on_gpu(*, in_triton: bool) -> Iterator[None]:
    """Let kernels be chosen as on an H200, and layers stay torch's; `in_triton`: but for those it runs."""
    with ExitStack() as stack:
        for name in (
            "kvq.cache.kv_cache",
            "kvq.cache.stores.make",
            "kvq.cache.stores.centered",
            "kvq.weights.install",
        ):
            stack.enter_context(patch.object(import_module(name), "Device", _Hopper))
        models, weights = import_module("kvq.models.model"), import_module("kvq.models.loading.weights")
        stack.enter_context(patch.object(models, "runs_in_triton", lambda prepared: in_triton))
        stack.enter_context(patch.object(weights, "pack_linears", lambda model, backend: None))
        stack.enter_context(patch.object(weights, "fuse_norms", lambda model: None))
        yield
