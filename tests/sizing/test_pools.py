"""How memory is shared out among layer groups, those that stage tokens first."""

from dataclasses import replace

import pytest

from kvq.capacity.lengths import Demand, fixed
from kvq.capacity.plan.target import find_model, make_target
from kvq.capacity.plan.users import count_users
from kvq.geometry import parse_geometry
from kvq.layout import KVLayout, Role
from kvq.models.resolve import EMBEDDED
from kvq.sizing.memory import kv_layout
from kvq.sizing.pools import (
    PoolPlan,
    bytes_of,
    plan_pools,
    sequence_blocks,
    share_blocks,
    step_blocks,
    wanted_blocks,
)

SIZE, RECENT, SINKS = 32, 64, 32
STEP = 2048  # tokens


def staged() -> KVLayout:
    """The blocks of Llama 3 8B as int4, and groups for recent and first rows over the same layers."""
    geometry = parse_geometry(find_model("llama-3-8b").config)
    sealed, plain = (kv_layout(geometry, kv, block_size=SIZE) for kv in ("int4", "bf16"))
    (group,) = plain.groups
    recent = replace(group, group=replace(group.group, window=RECENT + SIZE), role=Role.RECENT)
    sinks = replace(group, role=Role.SINKS, limit=SINKS)
    return replace(sealed, groups=(*sealed.groups, recent, sinks))


def test_staging_groups_want_their_windows_the_first_tokens_and_two_steps() -> None:
    wanted = wanted_blocks(staged(), sequences=100, max_context=8192, step_tokens=STEP)
    assert wanted == [100 * 256, 100 * (3 + 1) + 2 * 64, 100]
    short = wanted_blocks(staged(), sequences=100, max_context=20, step_tokens=STEP)
    assert short == [100, 100 + 2 * 64, 100]
    assert sequence_blocks(staged(), 5000, 100, step_tokens=STEP) == [160, 4, 1]
    assert sequence_blocks(staged(), 20, 10, step_tokens=STEP) == [1, 1, 1]


def test_staging_groups_get_all_they_want_and_the_others_share_the_rest() -> None:
    layout = staged()
    wanted = wanted_blocks(layout, sequences=100, max_context=8192, step_tokens=STEP)
    budget = bytes_of(layout, wanted) // 2
    blocks = share_blocks(layout, wanted, budget)
    assert blocks[1:] == wanted[1:]
    assert budget - layout.groups[0].block_bytes < bytes_of(layout, blocks) <= budget
    assert share_blocks(layout, wanted, 10**15) == wanted


def test_staging_groups_take_at_most_half() -> None:
    layout = staged()
    wanted = wanted_blocks(layout, sequences=4000, max_context=8192, step_tokens=STEP)
    budget = 4 * 10**9
    blocks = share_blocks(layout, wanted, budget)
    assert 1.99e9 < bytes_of(layout, [0, *blocks[1:]]) <= 2e9
    assert blocks[1] / wanted[1] == pytest.approx(blocks[2] / wanted[2], rel=0.01)
    assert 3.9e9 < bytes_of(layout, blocks) <= budget


MIB = 1 << 20
LIMITS = {"sequences": 128, "max_context": 4096, "step_tokens": STEP}


def tiny(kv: str) -> KVLayout:
    """The blocks of the embedded model."""
    return kv_layout(make_target(EMBEDDED["tiny"]).geometry, kv, block_size=SIZE)


def users(layout: KVLayout, pools: PoolPlan) -> int:
    """Of 1,024 tokens each."""
    demand = Demand(lengths=fixed(1024, 1))
    return count_users(layout, pools.num_blocks, demand, step_tokens=pools.step_tokens, seats=128).paged


@pytest.mark.parametrize("kv", ["int4_g64_s8_mean_rot", "int4+recent=1", "int3+sinks=4+recent=128"])
@pytest.mark.parametrize("mib", [8, 16, 32, 64, 256, 4096])
def test_steps_of_a_staged_pool_take_an_eighth_of_it_and_leave_room_for_sequences(kv, mib):
    layout, budget = tiny(kv), mib * MIB
    pools = plan_pools(layout, budget, **LIMITS)
    assert pools.step_tokens % SIZE == 0
    assert 128 <= pools.step_tokens <= STEP
    steps = bytes_of(layout, step_blocks(layout, pools.step_tokens))
    assert steps <= budget / 8 or pools.step_tokens == 128  # a token of each sequence
    assert bytes_of(layout, pools.num_blocks) <= budget
    plain = plan_pools(tiny("bf16"), budget, **LIMITS)
    assert users(layout, pools) > users(tiny("bf16"), plain) or users(layout, pools) == 128


def test_an_unstaged_pool_and_one_without_a_limit_keep_their_steps() -> None:
    for kv, budget in (("int4", 4 * MIB), ("int4+recent=1", None)):
        pools = plan_pools(tiny(kv), budget, **LIMITS)
        assert pools.step_tokens == STEP
    assert pools.num_blocks == wanted_blocks(tiny("int4+recent=1"), **LIMITS)


def test_no_memory_is_no_blocks() -> None:
    layout = staged()
    assert share_blocks(layout, [10, 10, 10], -5) == [0, 0, 0]


def test_as_many_sequences_are_counted_as_staging_groups_were_made_for() -> None:
    layout = staged()
    blocks = wanted_blocks(layout, sequences=100, max_context=8192, step_tokens=STEP)
    demand = Demand(lengths=fixed(8192))
    assert count_users(layout, blocks, demand, step_tokens=STEP).paged == 100
    for group, most in ((1, 99), (2, 99)):
        fewer = [count - (group == i) for i, count in enumerate(blocks)]
        assert count_users(layout, fewer, demand, step_tokens=STEP).paged == most
