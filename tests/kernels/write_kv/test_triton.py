"""write_kv in Triton: one launch, whatever is written (SGLang launched five kernels, issue 30815)."""

from typing import Any

import pytest
import torch

from kvq.kernels.write_kv import triton as kernel
from tests.kernels.kit import poisoned_cache, rows_like_kv


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, launched: Any) -> None:
        self.launched, self.arg_names = launched, launched.arg_names
        self.grids: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        self.grids.append(grid)
        return self.launched[grid]


@pytest.mark.parametrize("kv", ["int4", "k8v4", "fp8_per_head_rot", "bf16"])
def test_a_write_is_one_launch(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(kernel._write_kernel)
    monkeypatch.setattr(kernel, "_write_kernel", counted)
    cache = poisoned_cache(kv, [(48, 60)])
    k, v = rows_like_kv(7, 3, 48), rows_like_kv(7, 3, 60)
    kernel.write_kv(k, v, cache.layer(0), torch.arange(7))
    assert counted.grids == [(7,)]
