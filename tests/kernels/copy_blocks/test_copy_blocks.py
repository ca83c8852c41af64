"""copy_blocks: the bytes that copying one pair after another would give, and no others."""

import random
from collections.abc import Callable

import pytest
import torch

from kvq.errors import ConfigError
from kvq.kernels.copy_blocks.cpu import copy_blocks as cpu_copy_blocks
from kvq.kernels.copy_blocks.reference import copy_blocks, copy_together, final_sources
from kvq.layout import BlockOrder
from tests.kernels.kit import poisoned_cache

IMPLEMENTATIONS = (copy_blocks, copy_together, cpu_copy_blocks)
DIMS = [(60, 48), (48, 60), (64, 64)]
WINDOWS = [None, 16, None]
CASES = [
    [],
    [(3, 4)],
    [(0, 1), (1, 2)],  # a chain: both end as 0
    [(1, 2), (0, 1)],  # 2 gets what 1 held before
    [(0, 1), (1, 2), (2, 0)],
    [(0, 1), (1, 0)],  # no swap: 0 keeps its bytes
    [(0, 1), (2, 1)],  # the last one wins
    [(0, 1), (1, 2), (3, 1), (1, 4)],  # 1 is source and target twice
    [(5, 5)],
    [(0, 1), (1, 1), (1, 2)],
    [(6, 0), (0, 6), (6, 0)],
]


def random_cases() -> list[list[tuple[int, int]]]:
    """Lists of pairs over few blocks, so that most overlap."""
    draw = random.Random(5)
    return [
        [(draw.randrange(7), draw.randrange(7)) for _ in range(draw.randrange(1, 12))] for _ in range(100)
    ]


@pytest.mark.parametrize("order", list(BlockOrder))
def test_chains_and_overlaps_end_as_if_copied_one_after_another(order: BlockOrder) -> None:
    cache = poisoned_cache("int4", DIMS, windows=WINDOWS, block_size=3, num_blocks=7, order=order)
    layout = cache.layout.groups[0]
    for pairs in CASES + random_cases():
        pool = cache.pool(0).random_(0, 256)
        expected = pool.clone()
        for source, target in pairs:
            for a, b in zip(layout.runs(source, 7), layout.runs(target, 7), strict=True):
                moved = expected[a.offset : a.offset + a.nbytes].clone()
                expected[b.offset : b.offset + b.nbytes] = moved
        before, other = pool.clone(), cache.pool(1).clone()
        cache.copy(0, pairs)
        assert torch.equal(pool, expected), pairs
        assert torch.equal(cache.pool(1), other)
        for copy in IMPLEMENTATIONS:
            pool.copy_(before)
            copy(cache._pools[0].parts, pairs)
            assert torch.equal(pool, expected), pairs


def test_blocks_that_keep_their_bytes_are_not_touched() -> None:
    assert final_sources([(0, 1), (1, 0)]) == {1: 0}
    assert final_sources([(2, 2)]) == {}


@pytest.mark.parametrize("copy", IMPLEMENTATIONS)
def test_a_part_that_is_a_view_with_gaps_is_copied_by_its_strides(copy: Callable[..., None]) -> None:
    memory = torch.arange(40, dtype=torch.uint8).view(4, 10)
    before = memory.clone()
    copy([memory[:, :4], memory[:, 6:8]], [(3, 0)])
    before[0, :4], before[0, 6:8] = before[3, :4], before[3, 6:8]
    assert torch.equal(memory, before)


@pytest.mark.parametrize("pair", [(0, 4), (4, 0), (-1, 0), (0, -1)])
def test_compiled_copies_refuse_blocks_outside_the_pool_before_anything_moves(pair: tuple[int, int]) -> None:
    memory = torch.arange(40, dtype=torch.uint8).view(4, 10)
    before = memory.clone()
    with pytest.raises(IndexError, match="outside the pool"):
        cpu_copy_blocks([memory], [(3, 0), pair])
    assert torch.equal(memory, before)


def test_compiled_copies_refuse_parts_that_are_not_rows_of_bytes() -> None:
    for part in (torch.zeros(4, 4), torch.zeros(8, 8, dtype=torch.uint8)[:, ::2]):
        with pytest.raises(ConfigError, match="uint8"):
            cpu_copy_blocks([part], [(0, 1)])


def test_blocks_larger_than_a_slice_are_copied_whole() -> None:
    memory = torch.randint(0, 256, (9, 700_001), dtype=torch.uint8)  # more than one thread's work
    expected = memory.clone()
    for source, target in ((0, 1), (1, 8), (3, 1)):
        expected[target] = expected[source]
    cpu_copy_blocks([memory[:, :70_000], memory[:, 70_000:]], [(0, 1), (1, 8), (3, 1)])
    assert torch.equal(memory, expected)
