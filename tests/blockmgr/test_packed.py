"""Packed blocks that several loads read."""

from typing import Any

import pytest

from kvq.blockmgr import BlockManager, Copy, Fill
from kvq.tiers.tiers import BlockKey

SIZE, PROMPT = 4, list(range(33))  # eight whole blocks


def packed_manager() -> BlockManager:
    """A manager whose only pool has packed the prompt's blocks."""
    manager = BlockManager(
        num_blocks=[60], block_size=SIZE, windows=[None], rungs={0: [4, 2]}, block_bytes=[8]
    )
    for tokens in (PROMPT, list(range(100, 332))):
        sequence = manager.start(manager.prompt(tokens))
        manager.append([(sequence, len(tokens))])
        manager.commit(sequence)
        manager.free(sequence)
    assert num_packed(manager) == 8
    manager.take_orders()
    return manager


def num_packed(manager: BlockManager) -> int:
    """How many of the prompt's blocks are packed."""
    prompt, index = manager.prompt(PROMPT), manager.blocks.index
    keys = [BlockKey(prompt.root, index.digest_at(prompt, i), 0) for i in range(8)]
    return sum(manager.blocks.ladder.find(key) is not None for key in keys)


def fill(manager: BlockManager, restore: Any) -> None:
    for index in range(len(restore.missing)):
        manager.below.fill(restore, index)


@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_two_loads_read_the_same_packed_blocks(first: bool, second: bool) -> None:
    manager = packed_manager()
    loads = [manager.below.restore(manager.prompt(PROMPT), 32) for _ in range(2)]
    for restore, is_complete in zip(loads, (first, second), strict=True):
        assert len(restore.packed) == 8
        fill(manager, restore)
        assert sum(isinstance(order, Fill) for order in manager.take_orders()) == 8
        manager.below.end(restore, is_complete=is_complete)
        if is_complete:
            manager.free(restore.sequence)
        manager.check_integrity()
    assert num_packed(manager) == (0 if first or second else 8)
    assert manager.lookup(manager.prompt(PROMPT)).length == (32 if first or second else 0)
    manager.drop_cached()
    assert manager.usage()[0].free == 60


def test_what_is_computed_replaces_blocks_that_lost_bits() -> None:
    manager = packed_manager()
    restore = manager.below.restore(manager.prompt(PROMPT), 32)
    fill(manager, restore)
    manager.below.end(restore, is_complete=True)
    manager.free(restore.sequence)
    manager.blocks.cold_share = 0.5
    prompt = manager.prompt(PROMPT)
    assert manager.lookup(prompt).length == 16, "half of the blocks"
    assert manager.below.restorable(prompt) == 16
    assert manager.below.is_too_cold(prompt, 4)
    manager.take_orders()
    sequence = manager.start(prompt)
    assert sequence.length == 16
    assert manager.below.cold_tokens(sequence) == 16
    manager.append([(sequence, 17)])
    written = sequence.tables[0][4:8]
    manager.commit(sequence)
    copies = [order for order in manager.take_orders() if isinstance(order, Copy)]
    assert [copy.source for copy in copies] == written
    assert [copy.target for copy in copies] == sequence.tables[0][4:8]
    assert manager.below.cold_tokens(sequence) == 16, "the first half"
    manager.free(sequence)
    assert manager.lookup(prompt).length == 32
    manager.check_integrity()
