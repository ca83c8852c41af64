"""How memory is shared out among layer groups: one long sequence first, then many."""

import random
from itertools import pairwise

import pytest

from kvq.capacity.lengths import Demand, fixed
from kvq.capacity.plan.memory import count_users
from kvq.capacity.plan.target import find_model, make_target
from kvq.engine.config import EngineConfig
from kvq.engine.device.memory import planned_pools
from kvq.errors import OutOfMemory
from kvq.geometry import ModelGeometry, parse_geometry
from kvq.layout import KVLayout, Role
from kvq.models.describe.resolve import EMBEDDED
from kvq.scheduler import Reach, most_blocks
from kvq.sizes import binary
from kvq.sizing.memory import kv_layout
from kvq.sizing.needs import bytes_of, sequence_blocks, sequences_blocks, step_blocks, wanted_blocks
from kvq.sizing.pools import PoolPlan, at_once, longest_context, plan_pools, share_blocks

SIZE, RECENT, SINKS = 32, 64, 32
STEP = 2048  # tokens


def staged() -> KVLayout:
    """The blocks of Llama 3 8B as int4, and groups for recent and first rows over the same layers."""
    return kv_layout(geometry("llama-3-8b"), f"int4+sinks={SINKS}+recent={RECENT}", block_size=SIZE)


def geometry(name: str) -> ModelGeometry:
    return parse_geometry(find_model(name).config)


def test_staging_groups_want_their_windows_the_first_tokens_and_a_step() -> None:
    wanted = wanted_blocks(staged(), sequences=100, max_context=8192, step_tokens=STEP)
    assert wanted == [100 * 256, 100 * (3 + 1) + 64, 100]
    short = wanted_blocks(staged(), sequences=100, max_context=20, step_tokens=STEP)
    assert short == [100, 100 + 64, 100]
    assert sequence_blocks(staged(), 5000, 100, step_tokens=STEP) == [160, 4, 1]
    assert sequence_blocks(staged(), 20, 10, step_tokens=STEP) == [1, 1, 1]


def test_staging_groups_get_all_they_want_and_the_others_share_the_rest() -> None:
    layout, limits = staged(), {"sequences": 100, "max_context": 8192, "step_tokens": STEP}
    wanted = wanted_blocks(layout, **limits)
    budget = bytes_of(layout, wanted) // 2
    blocks = plan_pools(layout, budget, **limits).num_blocks
    assert blocks[1:] == wanted[1:]
    assert budget - layout.groups[0].block_bytes < bytes_of(layout, blocks) <= budget
    assert plan_pools(layout, 10**15, **limits).num_blocks == wanted


@pytest.mark.parametrize("gb", [2, 4, 40])
def test_staging_groups_take_what_as_many_short_sequences_need_as_fit(gb: int) -> None:
    layout, budget = staged(), gb * 10**9
    pools = plan_pools(layout, budget, sequences=4000, max_context=8192, step_tokens=STEP)
    many = sequences_blocks(layout, 512, 1, count=pools.num_blocks[2], step_tokens=pools.step_tokens)
    more = sequences_blocks(layout, 512, 1, count=pools.num_blocks[2] + 1, step_tokens=pools.step_tokens)
    assert bytes_of(layout, many) <= budget < bytes_of(layout, more)
    assert pools.num_blocks[1:] == many[1:]
    assert pools.num_blocks[0] >= many[0]
    assert 0.99 * budget < bytes_of(layout, pools.num_blocks) <= budget


def test_a_share_is_the_same_for_all_but_those_that_need_more() -> None:
    layout = staged()
    sizes = [group.block_bytes for group in layout.groups]
    budget = 100 * sizes[0] + 50 * sizes[1] + 25 * sizes[2]
    assert share_blocks(layout, [400, 200, 100], budget) == [100, 50, 25]
    found = share_blocks(layout, [400, 200, 100], budget, [0, 0, 40])
    share = (budget - 40 * sizes[2]) / (400 * sizes[0] + 200 * sizes[1])
    assert found == [int(400 * share), int(200 * share), 40]
    assert share_blocks(layout, [400, 200, 100], budget, [100, 50, 25]) == [100, 50, 25]


MIB = 1 << 20
LIMITS = {"sequences": 128, "max_context": 4096, "step_tokens": STEP}


def tiny(kv: str) -> KVLayout:
    """The blocks of the embedded model."""
    return kv_layout(make_target(EMBEDDED["tiny"]).geometry, kv, block_size=SIZE)


def users(layout: KVLayout, pools: PoolPlan) -> int:
    """Of 1,024 tokens each."""
    demand = Demand(lengths=fixed(1024, 1))
    return count_users(layout, pools.num_blocks, demand, step_tokens=pools.step_tokens, most=128).paged


@pytest.mark.parametrize("kv", ["int4_g64_s8_mean_rot", "int4+recent=1", "int3+sinks=4+recent=128"])
@pytest.mark.parametrize("mib", [8, 16, 32, 64, 256, 4096])
def test_a_step_of_a_staged_pool_takes_a_sixteenth_of_it_and_leaves_room_for_sequences(kv, mib):
    layout, budget = tiny(kv), mib * MIB
    pools = plan_pools(layout, budget, **LIMITS)
    assert pools.step_tokens % SIZE == 0
    assert 128 <= pools.step_tokens <= STEP
    assert bytes_of(layout, step_blocks(layout, pools.step_tokens)) <= budget / 16
    assert pools.sequences == 128
    assert bytes_of(layout, pools.num_blocks) <= budget
    plain = plan_pools(tiny("bf16"), budget, **LIMITS)
    assert users(layout, pools) > users(tiny("bf16"), plain) or users(layout, pools) == 128


def test_an_unstaged_pool_and_one_without_a_limit_keep_their_steps() -> None:
    for kv, budget in (("int4_g32", 4 * MIB), ("int4+recent=1", None)):
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


# The longest context: what memory holds is served, whatever it is and however it is divided.

FORMATS = [
    *("int4", "int4_mean", "int3+sinks=4+recent=128", "int3_mean+recent=1024", "int8/int4_mean+recent=4000"),
    *("int3_mean+recent=65536", "int3+sinks=2048", "int3_mean+sinks=700+recent=300"),
]
MODELS = {"tiny": 4096, "gemma-2-9b": 8192, "llama-3-8b": 131072}  # and the longest context


def blocks_of(name: str, kv: str) -> KVLayout:
    return tiny(kv) if name == "tiny" else kv_layout(geometry(name), kv, block_size=SIZE)


def alone(layout: KVLayout, tokens: int, step: int) -> tuple[int, int]:
    """Bytes of what a sequence holds at most, by the rule that refuses it: in sealed groups, in others."""
    reaches = [Reach(group.group.window, group.limit) for group in layout.groups]
    sealed = staging = 0
    for count, group in zip(most_blocks(tokens, 1, reaches, SIZE, step), layout.groups, strict=True):
        sealed += count * group.block_bytes * (group.role is Role.SEALED)
        staging += count * group.block_bytes * (group.role is not Role.SEALED)
    return sealed, staging


def by_hand(layout: KVLayout, budget: int, most: int, *, step: int, others: float) -> int:
    """The longest sequence that fits, whole blocks tried one after another; 0: none does."""

    def fits(tokens: int, least: float) -> bool:
        sealed, staging = alone(layout, tokens, step)
        return sealed + max(staging, least) <= budget

    if fits(most, 0):
        return most
    found = 0
    for tokens in range(SIZE, most, SIZE):
        if not fits(tokens, others * budget):
            break
        found = tokens
    return found


def budgets(layout: KVLayout, context: int, seed: int) -> list[int]:
    """From less than a block to more than ten sequences, and what is just enough for one and just not."""
    rng, whole = random.Random(seed), sum(alone(layout, context, SIZE))
    one = sum(group.block_bytes for group in layout.groups)
    found = [one - 1, one, one + 1, whole - 1, whole, whole + 1]
    found += [int(one * (10 * whole / one) ** rng.random()) for _ in range(30)]
    return sorted(found)


@pytest.mark.daily(16)
@pytest.mark.parametrize("sequences", [1, 128])
@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_the_longest_context_is_what_a_division_by_hand_finds_and_grows_with_memory(name, kv, sequences):
    layout, seed = blocks_of(name, kv), 100 * FORMATS.index(kv) + sequences
    one = sum(group.block_bytes for group in layout.groups)
    is_staged = layout.recipe.is_staged
    for context in (100, 1000, MODELS[name]):
        before = 0
        for budget in budgets(layout, context, seed):
            pools = plan_pools(layout, budget, sequences=sequences, max_context=context, step_tokens=STEP)
            assert bytes_of(layout, pools.num_blocks) <= budget
            if budget < one:
                assert not any(pools.num_blocks)
                continue
            assert min(pools.num_blocks) > 0
            found = longest_context(layout, pools, context)
            step = SIZE if is_staged else STEP
            assert found <= by_hand(layout, budget, context, step=step, others=0)
            assert found >= by_hand(layout, budget, context, step=step, others=is_staged / 8)
            assert found >= before
            before = found
            assert pools.sequences <= max(pools.step_tokens, 1)
            assert at_once(layout, pools, found).count >= 1
        assert before == context


@pytest.mark.parametrize("kv", FORMATS)
def test_a_byte_more_never_admits_less(kv):
    layout = tiny(kv)
    found = []
    for budget in range(100_000, 12 * MIB, 40_009):
        pools = plan_pools(layout, budget, **LIMITS)
        found.append(longest_context(layout, pools, 4096) if min(pools.num_blocks) else 0)
    assert all(before <= after for before, after in pairwise(found))
    step = SIZE if layout.recipe.is_staged else STEP
    assert found[-1] == by_hand(layout, budget, 4096, step=step, others=0) > 2500


@pytest.mark.parametrize("kv", FORMATS)
def test_too_little_memory_says_what_is_given_and_what_is_needed_at_least(kv):
    layout = tiny(kv)
    least = sum(group.block_bytes for group in layout.groups)

    def pools(nbytes: int) -> PoolPlan:
        return planned_pools(
            layout,
            EngineConfig(kv_memory=nbytes),
            on_gpu=False,
            max_context=4096,
            free_bytes=None,
            activation_bytes=0,
        )

    assert pools(least).num_blocks == [1] * len(layout.groups)
    with pytest.raises(OutOfMemory, match=f"may take {binary(least // 2)}, .* takes {binary(least)}"):
        pools(least // 2)
    with pytest.raises(OutOfMemory):
        pools(least - 1)


def test_steps_grow_into_memory_that_no_sequence_could_use() -> None:
    layout = tiny("int3_mean+sinks=4+recent=128")
    limits = {"sequences": 2, "max_context": 512, "step_tokens": STEP}
    found = [plan_pools(layout, megabytes << 20, **limits) for megabytes in (2, 3, 4, 64)]
    steps = [pools.step_tokens for pools in found]
    assert steps == sorted(steps)
    assert 64 < steps[1] < steps[2] < steps[3] == STEP
    for pools, megabytes in zip(found, (2, 3, 4, 64), strict=True):
        assert bytes_of(layout, pools.num_blocks) <= megabytes << 20
        assert at_once(layout, pools, 512).count == (1 if megabytes == 2 else 2)


@pytest.mark.parametrize("kv", FORMATS)
def test_who_is_told_to_fit_at_once_has_blocks_in_every_group(kv):
    layout = tiny(kv)
    for mib in (1, 4, 8, 16, 64, 1024):
        pools = plan_pools(layout, mib * MIB, **LIMITS)
        for tokens in (1, 100, 1000, longest_context(layout, pools, 4096)):
            crowd = at_once(layout, pools, tokens)
            for count in {crowd.count, crowd.count + 1} - {0}:
                need = sequences_blocks(layout, tokens, 1, count=count, step_tokens=pools.step_tokens)
                lacking = [
                    g for g, n, own in zip(layout.groups, need, pools.num_blocks, strict=True) if n > own
                ]
                if count == crowd.count:
                    assert not lacking
                else:
                    assert crowd.limit in lacking or (crowd.limit is None and count > pools.sequences)
