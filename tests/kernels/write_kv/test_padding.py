"""write_kv in Triton: tokens of a captured step that are none."""

import pytest
import torch

from kvq.kernels.write_kv.triton import write_kv
from tests.kernels.kit import poisoned_cache, rows_like_kv

SLOTS = [-1, 7, -1, 33, -1]


@pytest.mark.parametrize("kv", ["bf16", "fp8", "int8_per_head", "int4"])
def test_slots_below_0_are_left_out(kv: str) -> None:
    """What is written is what the others alone write, and padding is never bad."""
    k, v = rows_like_kv(5, 3, 60), rows_like_kv(5, 3, 48)
    k[0, 1, 2] = v[2, 0, 0] = float("nan")
    some = [i for i, slot in enumerate(SLOTS) if slot >= 0]
    padded, packed = (poisoned_cache(kv, [(60, 48)]) for _ in range(2))
    bad = write_kv(k, v, padded.layer(0), torch.tensor(SLOTS))
    write_kv(k[some], v[some], packed.layer(0), torch.tensor([SLOTS[i] for i in some]))
    assert torch.equal(padded.pool(0), packed.pool(0))
    assert not bad.any()
