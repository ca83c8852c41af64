"""Models that run as on a GPU: their Triton kernels are interpreted, on CPU tensors."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import kvq
from kvq.cache import centering, kv_cache
from kvq.kernels import Device
from kvq.models import model as model_module
from kvq.models import weights as weights_module

H200 = Device(type="cuda", name="H200", capability=(9, 0))


class _Devices(Device):
    """Every device is an H200."""

    @classmethod
    def of(cls, device: Any) -> Device:
        return H200


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let kernels be chosen, and models be made, as on an H200."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy reports what saturates on purpose
        for module in (kv_cache, centering, import_module("kvq.weights.install")):
            patch.setattr(module, "Device", _Devices)
        patch.setattr(model_module, "runs_in_triton", lambda prepared: True)
        patch.setattr(weights_module, "pack_linears", lambda model, backend: None)
        patch.setattr(weights_module, "fuse_norms", lambda model: None)
        yield


def load_as_on_gpu(folder: Path, **options: Any) -> kvq.Model:
    """A model of plain torch layers, fused in Triton where it can be."""
    return kvq.load(folder, **{"kv": "fp32", "dtype": "fp32", "device": "cpu", "block_size": 8, **options})
