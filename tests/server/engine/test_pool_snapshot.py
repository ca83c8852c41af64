"""The snapshot: every block's state and owner, as the pool, the index and the tables have them."""

import pytest

from kvq.blockmgr import BlockManager
from kvq.server.engine.pool_snapshot import MAX_OWNERS, OTHERS, _BlockState, take_snapshot

TENANTS = ["a", "b"]


def manager(num_blocks: int = 12, **options: object) -> BlockManager:
    return BlockManager(num_blocks=[num_blocks], block_size=4, **options)


def run(blocks: BlockManager, tokens: list[int], **whose: str):
    """A sequence whose tokens were all computed."""
    prompt = blocks.prompt(tokens, **whose)
    sequence = blocks.start(prompt)
    blocks.append([(sequence, len(tokens) - sequence.length)])
    blocks.take_orders()
    blocks.commit(sequence, tokens[len(sequence.tokens) :])
    return sequence


def seen(cell: int) -> tuple[int, _BlockState]:
    return cell >> 2, _BlockState(cell & 3)


def test_every_block_has_its_state_and_its_owner():
    blocks = manager()
    first = run(blocks, list(range(10)), tenant="b")  # two full blocks and a part of one
    second = run(blocks, list(range(10)), tenant="b")  # shares the full ones
    run(blocks, list(range(6)), tenant="a")
    gone = run(blocks, list(range(50, 54)), tenant="a")
    table = gone.tables[0][:]
    blocks.free(gone)
    [cells] = take_snapshot(blocks, TENANTS)
    assert len(cells) == 12
    for block in first.tables[0][:2]:
        assert seen(cells[block]) == (2, _BlockState.SHARED)
    for block in (first.tables[0][2], second.tables[0][2]):
        assert seen(cells[block]) == (2, _BlockState.LIVE)
    assert seen(cells[table[0]]) == (1, _BlockState.CACHED)
    usage = blocks.pools[0].usage()
    assert [c & 3 for c in cells].count(_BlockState.FREE) == usage.free == cells.count(0)
    assert [c & 3 for c in cells].count(_BlockState.CACHED) == usage.cached == 1


def test_what_a_salt_shares_is_nobodys_alone_and_unknown_tenants_stay_unnamed():
    blocks = manager()
    blocks.free(run(blocks, list(range(4)), tenant="a", shared_salt="all"))
    blocks.free(run(blocks, list(range(4)), tenant="stranger"))
    [cells] = take_snapshot(blocks, TENANTS)
    assert [seen(c) for c in cells if c] == [(0, _BlockState.CACHED)] * 2


@pytest.mark.parametrize("stride", [2, 5, 12, 13])
def test_a_stride_looks_at_some_blocks_only(stride):
    blocks = manager()
    run(blocks, list(range(22)), tenant="a")
    [whole] = take_snapshot(blocks, TENANTS)
    assert take_snapshot(blocks, TENANTS, stride=stride) == [whole[::stride]]


def test_beyond_so_many_tenants_the_rest_is_one():
    blocks = manager(num_blocks=MAX_OWNERS + 3)
    tenants = [f"key-{i}" for i in range(MAX_OWNERS + 3)]
    for tenant in tenants:
        run(blocks, [1, 2], tenant=tenant)
    [cells] = take_snapshot(blocks, tenants)
    assert sorted(seen(c)[0] for c in cells) == [*range(1, MAX_OWNERS + 1), OTHERS, OTHERS, OTHERS]
