"""copy_blocks in Triton's interpreter: the reference's bytes, for any chain of pairs."""

import pytest
import torch

from kvq.kernels.copy_blocks.reference import copy_blocks as reference
from kvq.kernels.copy_blocks.triton import copy_blocks
from kvq.layout import BlockOrder
from tests.kernels.copy_blocks.test_copy_blocks import CASES, DIMS, random_cases
from tests.kernels.kit import poisoned_cache


@pytest.mark.parametrize("order", list(BlockOrder))
def test_any_pairs_end_as_the_reference_leaves_them(order: BlockOrder) -> None:
    cache = poisoned_cache("k8v4", DIMS, block_size=3, num_blocks=7, order=order)
    parts = cache._pools[0].parts
    for pairs in CASES + random_cases()[:20]:
        pool = cache.pool(0).random_(0, 256)
        before = pool.clone()
        reference(parts, pairs)
        want = pool.clone()
        pool.copy_(before)
        copy_blocks(parts, pairs)
        assert torch.equal(pool, want), pairs


def test_runs_longer_than_one_program_copies() -> None:
    parts = [torch.randint(0, 256, (5, n), dtype=torch.uint8) for n in (10_001, 16)]
    want = [part.clone() for part in parts]
    reference(want, [(0, 3), (4, 1)])
    copy_blocks(parts, [(0, 3), (4, 1)])
    assert all(torch.equal(a, b) for a, b in zip(parts, want, strict=True))
