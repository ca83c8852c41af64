"""Swapping: what goes out comes back or is found again, and damage costs only what it hit."""

import pytest

from kvq.blockmgr import BlockManager, Sequence, SwapIn, SwapOut
from kvq.errors import ConfigError, OutOfBlocks
from tests.blockmgr.helpers import cache, compute, hit, manager, run
from tests.blockmgr.state import state


def swapped(blocks: BlockManager, tokens: range) -> Sequence:
    sequence = run(blocks, tokens)
    blocks.swap_out(sequence)
    return sequence


def test_every_held_block_moves_to_a_slot_of_its_own() -> None:
    blocks = manager(9, 9, windows=[None, 4], host_slots=[5, 3])
    sequence = run(blocks, range(7))
    held = [table[start:] for table, start in zip(sequence.tables, sequence.starts, strict=True)]
    blocks.swap_out(sequence)
    orders = blocks.take_orders()
    assert [(o.group, o.block) for o in orders if isinstance(o, SwapOut)] == [
        (group, block) for group in (0, 1) for block in held[group]
    ]
    assert len({(o.group, o.slot) for o in orders if isinstance(o, SwapOut)}) == len(orders) == 6
    assert blocks.swap.num_free == [1, 1]
    assert sequence.is_swapped
    assert sequence.receipt.swapped == 6
    assert [usage.live for usage in blocks.usage()] == [0, 0]


def test_what_the_index_still_holds_is_shared_and_the_rest_comes_back() -> None:
    blocks = manager(9, host_slots=[9])
    sequence = swapped(blocks, range(7))
    slots = dict(sequence.swapped[0]) if sequence.swapped else {}
    blocks.take_orders()
    blocks.pools[0].release_all(blocks.pools[0].allocate(7))  # the deepest of three cached ones goes
    assert blocks.can_swap_in(sequence)
    blocks.swap_in(sequence)
    assert blocks.take_orders() == [
        SwapIn(group=0, slot=slots[i], block=sequence.tables[0][i]) for i in (2, 3)
    ]
    assert (sequence.depth, sequence.receipt.shared, sequence.receipt.own) == (2, 2, 4 + 2)
    assert blocks.swap.num_free == [9]
    blocks.recover(sequence, [])
    compute(blocks, sequence, [7])
    compute(blocks, sequence)
    assert sequence.depth == 4


def test_a_swapped_sequence_ends_and_its_slots_are_free() -> None:
    blocks = manager(9, host_slots=[4])
    blocks.free(swapped(blocks, range(7)))
    assert blocks.swap.num_free == [4]
    blocks.check_integrity()


def test_too_few_host_slots_change_nothing() -> None:
    blocks = manager(9, 9, host_slots=[9, 3])
    sequence = run(blocks, range(7))
    before = state(blocks)
    assert not blocks.can_swap_out(sequence)
    with pytest.raises(OutOfBlocks, match=r"8 blocks don't fit .* \[9, 3\]; free the sequence"):
        blocks.swap_out(sequence)
    assert state(blocks) == before


def test_uncommitted_tokens_are_not_swapped_out() -> None:
    blocks = manager(9, host_slots=[9])
    sequence = run(blocks, range(3))
    blocks.append([(sequence, 1)])
    with pytest.raises(ConfigError, match="can't swap out a sequence with 1 tokens"):
        blocks.swap_out(sequence)


def test_a_refused_swap_in_leaves_even_the_order_of_eviction() -> None:
    blocks = manager(6, host_slots=[9])
    sequence = swapped(blocks, range(7))
    other = run(blocks, range(20, 24))
    third = run(blocks, range(30, 32))
    run(blocks, range(40, 42))
    before = state(blocks)
    assert not blocks.can_swap_in(sequence)
    with pytest.raises(OutOfBlocks, match=r"need \[\d\] blocks per layer group beside those shared"):
        blocks.swap_in(sequence)
    assert state(blocks) == before
    blocks.free(other)
    blocks.free(third)
    blocks.swap_in(sequence)
    blocks.check_integrity()


@pytest.mark.parametrize("lost", [[1], [2], [3], [1, 3], [3, 1]])
def test_damage_costs_the_tokens_from_the_first_lost_block_on(lost: list[int]) -> None:
    blocks = manager(9, host_slots=[9])
    sequence = swapped(blocks, range(7))
    blocks.drop_cached()
    blocks.take_orders()
    blocks.swap_in(sequence)
    orders = [order for order in blocks.take_orders() if isinstance(order, SwapIn)]
    blocks.recover(sequence, [orders[i] for i in lost])
    assert sequence.length == sequence.committed == min(lost) * 2
    assert sequence.receipt.recomputed == 7 - min(lost) * 2
    assert list(sequence.tokens) == list(range(7))
    blocks.check_integrity()
    compute(blocks, sequence)
    assert hit(blocks, range(8)) == 6


def test_damage_where_a_window_was_given_back_costs_everything() -> None:
    blocks = manager(9, 9, windows=[None, 3], host_slots=[9, 9])
    sequence = swapped(blocks, range(8))
    blocks.drop_cached()
    blocks.take_orders()
    blocks.swap_in(sequence)
    orders = [order for order in blocks.take_orders() if isinstance(order, SwapIn)]
    blocks.recover(sequence, [orders[2]])
    assert (sequence.length, sequence.starts, sequence.receipt.recomputed) == (0, [0, 0], 8)
    compute(blocks, sequence)
    blocks.check_integrity()


def test_damage_to_others_and_none_at_all_cost_nothing() -> None:
    blocks = manager(12, host_slots=[9])
    first, second = run(blocks, range(5)), run(blocks, range(10, 15))
    for sequence in (first, second):
        blocks.swap_out(sequence)
    blocks.drop_cached()
    blocks.take_orders()
    blocks.swap_in(first)
    blocks.swap_in(second)
    orders = blocks.take_orders()
    blocks.recover(second, [])
    blocks.recover(first, [o for o in orders if isinstance(o, SwapIn) and o.block in second.tables[0]])
    assert (first.length, first.receipt.recomputed) == (5, 0)


def test_an_empty_sequence_is_swapped_too() -> None:
    blocks = manager(3, host_slots=[0])
    sequence = blocks.new_sequence()
    blocks.swap_out(sequence)
    assert sequence.is_swapped
    blocks.swap_in(sequence)
    assert not sequence.is_swapped


def test_blocks_found_again_are_those_of_the_same_prefix() -> None:
    blocks = manager(9, host_slots=[9])
    sequence = swapped(blocks, range(6))
    blocks.drop_cached()
    other = run(blocks, range(7))  # indexed again, by somebody else
    blocks.swap_in(sequence)
    blocks.check_integrity()
    blocks.take_orders()
    blocks.recover(sequence, [])
    compute(blocks, sequence, [6, 7])
    compute(blocks, sequence)
    assert sequence.tables[0][:3] == other.tables[0][:3]
    blocks.check_integrity()


@pytest.mark.parametrize("use", ["append", "commit", "fork", "truncate", "scrub", "swap_out", "can_append"])
def test_nothing_is_done_with_bytes_that_are_not_confirmed(use: str) -> None:
    blocks = manager(20, host_slots=[20])
    sequence = swapped(blocks, range(7))
    blocks.drop_cached()
    blocks.take_orders()
    blocks.swap_in(sequence)
    arguments = {"append": ([(sequence, 1)],), "can_append": ([(sequence, 1)],), "truncate": (sequence, 2)}
    before = state(blocks)
    with pytest.raises(ConfigError, match="not confirmed; carry out the orders, then call recover"):
        getattr(blocks, use)(*arguments.get(use, (sequence,)))
    with pytest.raises(ConfigError, match="ordered and not carried out"):
        blocks.recover(sequence, [])
    assert state(blocks) == before
    orders = [order for order in blocks.take_orders() if isinstance(order, SwapIn)]
    blocks.recover(sequence, orders[:1])
    assert sequence.length == 0
    assert hit(blocks, range(8)) == 0
    with pytest.raises(ConfigError, match="nothing to recover"):
        blocks.recover(sequence, [])


def test_an_unconfirmed_sequence_may_be_freed() -> None:
    blocks = manager(9, host_slots=[9])
    sequence = swapped(blocks, range(7))
    blocks.drop_cached()
    blocks.swap_in(sequence)
    blocks.free(sequence)
    blocks.check_integrity()
    assert blocks.usage()[0].free == 9


def test_a_limited_groups_blocks_are_swapped_and_damage_to_them_costs_all_that_follows() -> None:
    blocks = manager(9, 9, host_slots=[9, 2], limits=[None, 4])
    sequence = swapped(blocks, range(9))
    assert blocks.swap.num_free == [4, 0]
    blocks.drop_cached()
    blocks.take_orders()
    blocks.swap_in(sequence)
    assert (sequence.starts, [len(table) for table in sequence.tables]) == ([0, 0], [5, 2])
    orders = [order for order in blocks.take_orders() if isinstance(order, SwapIn)]
    assert [order.group for order in orders] == [0] * 5 + [1] * 2
    blocks.recover(sequence, orders[-1:])
    assert (sequence.length, sequence.receipt.recomputed) == (2, 7)
    blocks.check_integrity()
    compute(blocks, sequence)
    assert hit(blocks, range(10)) == 8


def test_a_fork_after_a_swap_keeps_the_blocks_that_its_own_were_indexed_after() -> None:
    blocks = manager(16, host_slots=[9])
    sequence = swapped(blocks, range(7))
    blocks.drop_cached()
    blocks.swap_in(sequence)
    blocks.take_orders()
    blocks.recover(sequence, [])
    cache(blocks, [0, 1, 2, 3, 9, 9, 9])  # indexes the first two blocks, which forks share unindexed
    fork = blocks.fork(sequence)
    compute(blocks, fork, [7, 8])
    compute(blocks, fork)
    blocks.free(fork)
    blocks.free(sequence)
    blocks.check_integrity()
