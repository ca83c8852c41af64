"""Fixtures of tests of Linear kernels."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written is not a number."""
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> Tensor:
        out = empty(*args, **options)
        return out.fill_(float("nan")) if out.dtype in (torch.float32, torch.bfloat16) else out

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def steady_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter sums each dot product in one order; BLAS changes it at the edges of its tiles."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def dot(self: object, a: Any, b: Any, d: Any, *precision: object) -> Any:
        product = np.einsum("...ik,...kj->...ij", a.data, b.data, dtype=d.data.dtype, optimize=False)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
