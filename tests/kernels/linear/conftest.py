"""Fixtures of tests of Linear kernels."""

from typing import Any

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
