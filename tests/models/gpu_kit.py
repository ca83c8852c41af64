"""Models that run as on a GPU: their Triton kernels are interpreted, on CPU tensors."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvq
from benchmarks import as_on_gpu as imagined


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let kernels be chosen, and models be made, as on an H200."""
    with imagined.as_on_gpu(in_triton=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy reports what saturates on purpose
        yield


def load_as_on_gpu(folder: Path, **options: Any) -> kvq.Model:
    """A model of plain torch layers, fused in Triton where it can be."""
    return kvq.load(folder, **{"kv": "fp32", "dtype": "fp32", "device": "cpu", "block_size": 8, **options})
