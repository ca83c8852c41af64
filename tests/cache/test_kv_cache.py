"""The tensors behind the pools: allocated as reported, scrubbed by block, stable under appends."""

import pytest
import torch

from kvq.blockmgr import BlockId, BlockManager, Scrub
from kvq.cache import KVCache, memory
from kvq.cache.stores import make
from kvq.errors import ConfigError, OutOfMemory, UnsupportedKernel
from kvq.formats import KVRecipe
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.layout import BlockOrder, plan_layout
from kvq.sizes import binary
from tests.kernels.kit import (
    CPU,
    KINDS,
    POISON,
    geometry,
    poisoned_cache,
    rows_like_kv,
    slot_bytes,
    static_scales,
    stored,
)

ORDERS = list(BlockOrder)
DIMS = [(60, 48), (48, 60), (64, 64)]
WINDOWS = [None, 16, None]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kv", ["fp32", "int8", "int4", "int2_gQ_rot"])
def test_scrub_zeroes_codes_scales_and_padding_of_those_blocks_and_nothing_else(
    kv: str, order: BlockOrder
) -> None:
    cache = poisoned_cache(kv, DIMS, windows=WINDOWS, block_size=3, order=order)
    cache.scrub(0, [4, 9])
    scrubbed = torch.zeros(cache.pool(0).numel(), dtype=torch.bool)
    for block in (4, 9):
        for layer in (0, 2):
            scrubbed |= slot_bytes(cache, layer, [3 * block, 3 * block + 1, 3 * block + 2], padding=True)
    assert scrubbed.sum().item() == 2 * cache.layout.groups[0].block_bytes
    assert torch.equal(cache.pool(0) == 0, scrubbed)
    assert (cache.pool(0)[~scrubbed] == POISON).all()
    assert (cache.pool(1) == POISON).all()
    cache.scrub(1, [])
    assert (cache.pool(1) == POISON).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kv", [*KINDS, "int4_gQ_rot"])
def test_appending_tokens_never_changes_a_byte_of_stored_ones(kv: str, order: BlockOrder) -> None:
    cache = poisoned_cache(kv, DIMS, windows=WINDOWS, block_size=3, num_blocks=8, order=order)
    manager = BlockManager(num_blocks=cache.num_blocks, block_size=3)
    a, b = manager.new_sequence(), manager.new_sequence()
    for step, (new_a, new_b) in enumerate([(4, 0), (1, 5), (1, 1), (2, 1), (1, 0)]):
        slots = manager.append([(a, new_a), (b, new_b)])
        before = [cache.pool(group).clone() for group in (0, 1)]
        allowed = [torch.zeros(pool.numel(), dtype=torch.bool) for pool in before]
        for layer, (k_dim, v_dim) in enumerate(DIMS):
            group = cache.group_of[layer]
            k = rows_like_kv(new_a + new_b, 3, k_dim, step) * 10.0**step  # ever larger: scales would move
            v = rows_like_kv(new_a + new_b, 3, v_dim, step) * 10.0**step
            cache.write(layer, k, v, torch.tensor(slots[group]))
            allowed[group] |= slot_bytes(cache, layer, slots[group])
        for group in (0, 1):
            changed = cache.pool(group) != before[group]
            assert changed.any()
            assert not (changed & ~allowed[group]).any()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kv", [*KINDS, "int4_gQ_rot"])
def test_layers_never_share_a_byte(kv: str, order: BlockOrder) -> None:
    cache = poisoned_cache(kv, DIMS, windows=WINDOWS, block_size=3, order=order)
    slots = list(range(33))
    owners = [torch.zeros(cache.pool(group).numel(), dtype=torch.int32) for group in (0, 1)]
    for layer in range(3):
        owners[cache.group_of[layer]] += slot_bytes(cache, layer, slots)
    assert all(owner.max().item() == 1 for owner in owners)
    for layer, (k_dim, v_dim) in enumerate(DIMS):  # written one after the other
        cache.write(
            layer, rows_like_kv(33, 3, k_dim, layer), rows_like_kv(33, 3, v_dim, layer), torch.arange(33)
        )
    for layer, dims in enumerate(DIMS):  # and each reads back as if it had been alone
        alone = poisoned_cache(kv, DIMS, windows=WINDOWS, block_size=3, order=order)
        rows = [rows_like_kv(33, 3, dim, layer) for dim in dims]
        alone.write(layer, rows[0], rows[1], torch.arange(33))
        mask = slot_bytes(cache, layer, slots)
        group = cache.group_of[layer]
        assert torch.equal(cache.pool(group)[mask], alone.pool(group)[mask])


def test_write_and_attend_run_on_the_layers_own_blocks() -> None:
    cache = poisoned_cache("int8", DIMS, windows=WINDOWS)
    k, v = rows_like_kv(1, 3, 48), rows_like_kv(1, 3, 60)
    assert cache.write(1, k, v, torch.tensor([26])).tolist() == [False]
    batch = SequenceBatch(
        query_lens=(1,),
        context_lens=(2,),
        tables=torch.tensor([[5]], dtype=torch.int32),
        slots=torch.tensor([26]),
    )
    out, lse = cache.attend(1, k, batch, AttentionOptions(scale=0.1, window=1))
    torch.testing.assert_close(out, stored(cache, 1, "v", v))  # one visible key: its value is the answer
    assert lse.shape == (1, 3)
    assert cache.write(1, k * torch.nan, v, torch.tensor([26])).tolist() == [True]


@pytest.mark.parametrize("kv", ["fp8_per_head", "int8/int8_per_head_rot"])
def test_a_static_format_without_scales_is_refused(kv: str) -> None:
    model = geometry(DIMS)
    recipe = KVRecipe.uniform(kv, DIMS)
    with pytest.raises(ConfigError, match=r"needs static scales.*kvq calibrate.*--calibrate-on-load"):
        KVCache(plan_layout(model, recipe), num_blocks=[1], device=CPU)


def test_every_layer_and_head_gets_its_own_static_scale() -> None:
    cache = poisoned_cache("fp8_per_head/int8_per_head_rot", DIMS)
    maxima = static_scales([3, 3, 3])
    for layer in range(3):
        k, v = cache.layer(layer).k, cache.layer(layer).v
        assert k.scales is None
        assert v.scales is None
        expected_k = torch.tensor(maxima.layers[layer].k) / 448
        expected_v = torch.tensor(maxima.layers[layer].v_rotated) / 127
        torch.testing.assert_close(k.static_scale, expected_k, rtol=1e-6, atol=0)
        torch.testing.assert_close(v.static_scale, expected_v, rtol=1e-6, atol=0)


def test_pools_start_zeroed_and_decode_to_zero() -> None:
    model = geometry(DIMS)
    recipe = KVRecipe.uniform("int4", DIMS)
    cache = KVCache(plan_layout(model, recipe), num_blocks=[2], device=CPU)
    assert not cache.pool(0).any()


@pytest.fixture
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every allocation a failure of the test."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("something was allocated")

    monkeypatch.setattr(torch, "zeros", refuse)


@pytest.mark.usefixtures("no_allocation")
def test_a_pool_larger_than_free_memory_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda _: 3 * 2**30)
    model = geometry([(64, 64)])
    recipe = KVRecipe.uniform("bf16", [(64, 64)])
    layout = plan_layout(model, recipe)
    blocks = 4 * 2**30 // layout.groups[0].block_bytes
    needed = layout.groups[0].pool_bytes(blocks)
    message = rf"needs {binary(needed)} on cpu, but 3\.00 GiB is free; use a shorter context"
    with pytest.raises(OutOfMemory, match=message):
        KVCache(layout, num_blocks=[blocks], device=CPU)


@pytest.mark.usefixtures("no_allocation")
def test_petabytes_are_refused_on_this_very_machine() -> None:
    model = geometry([(64, 64)])
    recipe = KVRecipe.uniform("bf16", [(64, 64)])
    with pytest.raises(OutOfMemory, match=r"needs \d+\.\d\d? PiB on cpu, but .* is free"):
        KVCache(plan_layout(model, recipe), num_blocks=[10**11], device=CPU)


def test_a_layer_that_no_backend_can_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = geometry(DIMS)
    recipe = KVRecipe.uniform("int4", DIMS)

    def refuse(operation: str, *_: object) -> None:
        raise UnsupportedKernel(f"no backend can run {operation}")

    monkeypatch.setattr(make, "select", refuse)
    with pytest.raises(UnsupportedKernel, match="no backend can run write_kv"):
        KVCache(plan_layout(model, recipe), num_blocks=[2], device=CPU)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kv", ["fp32", "int4", "int4_gQ_rot", "k8v4"])
def test_growing_keeps_every_block_under_its_id_and_adds_zeroed_ones(kv: str, order: BlockOrder) -> None:
    cache = poisoned_cache(kv, DIMS, windows=WINDOWS, block_size=3, num_blocks=6, order=order)
    for group in (0, 1):
        cache.pool(group).random_(0, 256)
    before = [[cache.read_block(group, block) for block in range(6)] for group in (0, 1)]
    cache.grow([6, 13])
    cache.grow([7, 13])
    assert cache.num_blocks == [7, 13]
    sizes = [group.pool_bytes(n) for group, n in zip(cache.layout.groups, [7, 13], strict=True)]
    assert cache.nbytes == sum(sizes) == cache.pool(0).numel() + cache.pool(1).numel()
    for group, count in enumerate([7, 13]):
        for block in range(count):
            if block < 6:
                assert torch.equal(cache.read_block(group, block), before[group][block])
            else:
                assert not cache.read_block(group, block).any()


@pytest.mark.parametrize("order", ORDERS)
def test_layers_write_into_the_grown_pool(order: BlockOrder) -> None:
    cache = poisoned_cache("int8", DIMS, windows=WINDOWS, block_size=3, num_blocks=2, order=order)
    fresh = poisoned_cache("int8", DIMS, windows=WINDOWS, block_size=3, num_blocks=9, order=order, fill=0)
    with torch.inference_mode():
        cache.grow([9, 9])
    for layer, (k_dim, v_dim) in enumerate(DIMS):
        k, v = rows_like_kv(2, 3, k_dim), rows_like_kv(2, 3, v_dim)
        for one in (cache, fresh):
            one.write(layer, k, v, torch.tensor([26, 20]))  # outside inference mode
    for group in (0, 1):
        for block in range(2, 9):
            assert torch.equal(cache.read_block(group, block), fresh.read_block(group, block))
    cache.carry_out([Scrub(group=0, block=BlockId(8))])
    assert not cache.read_block(0, 8).any()


@pytest.mark.parametrize("num_blocks", [[5, 6], [7], [7, 7, 7]])
def test_a_pool_never_shrinks(num_blocks: list[int]) -> None:
    cache = poisoned_cache("int4", DIMS, windows=WINDOWS, num_blocks=6)
    with pytest.raises(ConfigError, match=r"pools can only grow, from \[6, 6\] blocks, got"):
        cache.grow(num_blocks)
    assert cache.num_blocks == [6, 6]


def test_growing_needs_room_for_one_groups_old_and_new_bytes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = poisoned_cache("int4", DIMS, windows=WINDOWS, num_blocks=6)
    first, second = (group.block_bytes for group in cache.layout.groups)
    peak = max(20 * first, 14 * first + 20 * second)  # beyond what is held before
    monkeypatch.setattr(memory, "available_bytes", lambda _: peak - 1)
    pools = [cache.pool(0), cache.pool(1)]
    with pytest.raises(OutOfMemory, match="the KV pool needs"):
        cache.grow([20, 20])
    assert cache.num_blocks == [6, 6]
    assert all(cache.pool(group) is pool for group, pool in enumerate(pools))
    monkeypatch.setattr(memory, "available_bytes", lambda _: peak)
    cache.grow([20, 20])
    assert cache.num_blocks == [20, 20]


def test_a_device_that_refuses_midway_leaves_every_block_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = poisoned_cache("int4", DIMS, windows=WINDOWS, num_blocks=6)
    empty, calls = torch.empty, []

    def second_fails(*args: object, **options: object) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", second_fails)
    with pytest.raises(OutOfMemory):
        cache.grow([9, 9])
    monkeypatch.undo()
    assert cache.num_blocks == [9, 6]
    assert (cache.read_block(0, 5) == POISON).all()
    assert (cache.pool(1) == POISON).all()
    cache.grow([9, 9])
    assert cache.num_blocks == [9, 9]


def test_blocks_read_alike_in_both_orders() -> None:
    caches = [poisoned_cache("k8v4", DIMS, windows=WINDOWS, order=order, fill=0) for order in ORDERS]
    for layer, (k_dim, v_dim) in enumerate(DIMS):
        for cache in caches:
            cache.write(layer, rows_like_kv(8, 3, k_dim), rows_like_kv(8, 3, v_dim), torch.arange(9, 17))
    for group in (0, 1):
        for block in range(11):
            assert torch.equal(*(cache.read_block(group, block) for cache in caches))
        content = torch.arange(caches[0].layout.groups[group].block_bytes).to(torch.uint8)
        for cache in caches:
            cache.write_block(group, 3, content)
            assert torch.equal(cache.read_block(group, 3), content)
