"""Block layout: every byte has one owner, and what is reported is what is allocated."""

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from kvq.blockmgr import BlockManager
from kvq.cache import KVCache
from kvq.errors import ConfigError
from kvq.formats import ExactTokens, KVRecipe
from kvq.geometry import ModelGeometry
from kvq.layout import ALIGNMENT, BlockOrder, GroupLayout, KVLayout, LayerLayout, Role, plan_layout
from tests.kernels.kit import KINDS, geometry, recipe_of, static_scales

ORDERS = list(BlockOrder)
REGIONS = ("k_codes", "v_codes", "k_scales", "v_scales", "k_means", "v_means")
STAGED = ("int4_mean", "int8/int2_mean", "bf16+recent=1", "int4+sinks=1", "int4_mean/int6+recent=40+sinks=33")
BLOCK_SIZES = [1, 16, 17, 32]
HEAD_DIMS = [(48, 48), (60, 60), (64, 64), (80, 80), (96, 96), (192, 192), (256, 256), (192, 128), (48, 60)]
# a model that mixes head dimensions within and across layer groups
MIXED = geometry([(256, 256), (60, 48), (80, 80), (192, 128)], windows=[None, 64, None, 64])


def regions(layer: LayerLayout) -> list[tuple[str, int, int]]:
    """(name, first byte, end) of the six regions."""
    assert [getattr(layer, name) for name in REGIONS] == list(layer.regions)
    return [
        (name, getattr(layer, name).offset, getattr(layer, name).offset + getattr(layer, name).nbytes)
        for name in REGIONS
    ]


def every_layout(
    model: ModelGeometry, order: BlockOrder = BlockOrder.LAYER_MAJOR
) -> list[tuple[KVRecipe, KVLayout]]:
    """One layout for every format and block size, fp16 scales included; none of them staged."""
    recipes = [recipe_of(kv, model.head_dims) for kv in (*KINDS, "int6/int2", "int4_gQ_rot", "int2_gQ/int8")]
    return [(r, plan_layout(model, r, block_size=n, order=order)) for r in recipes for n in BLOCK_SIZES]


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_regions_are_aligned_disjoint_and_cover_the_block_less_padding(dims: tuple[int, int]) -> None:
    for _, layout in every_layout(geometry([dims])):
        (layer,) = layout.groups[0].layers
        end = 0
        for _, first, last in regions(layer):
            assert first % ALIGNMENT == 0
            assert 0 <= first - end < ALIGNMENT  # behind the one before, with only its padding between
            end = last
        assert 0 <= layer.nbytes - end < ALIGNMENT
        assert layer.nbytes % ALIGNMENT == 0
    assert ALIGNMENT == 16


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_regions_hold_a_row_of_codes_and_of_scales_for_every_head_and_token(dims: tuple[int, int]) -> None:
    for recipe, layout in every_layout(geometry([dims], kv_heads=3)):
        (layer,) = layout.groups[0].layers
        formats = recipe.layers[0]
        rows = 3 * layout.block_size
        assert (layer.k_means.nbytes, layer.v_means.nbytes) == (0, 0)
        assert layer.k_codes.nbytes == rows * dims[0] * formats.k.code.bits // 8
        assert layer.v_codes.nbytes == rows * dims[1] * formats.v.code.bits // 8
        assert layer.k_scales.nbytes == rows * formats.k.scale_bytes(dims[0])
        assert layer.v_scales.nbytes == rows * formats.v.scale_bytes(dims[1])


def pool_map(group: GroupLayout, num_blocks: int) -> list[tuple[int, int, int]]:
    """(block, first byte, end) of all regions of all layers of all blocks, in a pool."""
    return [
        (block, start + first, start + end)
        for position, layer in enumerate(group.layers)
        for block in range(num_blocks)
        for start in [group.base(position, num_blocks) + block * group.block_stride(position)]
        for _, first, end in regions(layer)
    ]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kv", [*KINDS, *STAGED])
def test_no_two_regions_of_a_pool_overlap_and_all_are_aligned(kv: str, order: BlockOrder) -> None:
    layout = plan_layout(MIXED, KVRecipe.uniform(kv, MIXED.head_dims), block_size=17, order=order)
    for group in layout.groups:
        spans = sorted((first, end) for _, first, end in pool_map(group, 5) if end > first)
        assert all(first % 16 == 0 for first, _ in spans)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert spans[0][0] == 0
        assert group.pool_bytes(5) - 16 < spans[-1][1] <= group.pool_bytes(5)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kv", [*KINDS, *STAGED])
def test_the_runs_of_all_blocks_tile_the_pool_exactly(kv: str, order: BlockOrder) -> None:
    layout = plan_layout(MIXED, KVRecipe.uniform(kv, MIXED.head_dims), block_size=17, order=order)
    for group in layout.groups:
        runs = sorted((run.offset, run.nbytes) for block in range(7) for run in group.runs(block, 7))
        at = 0
        for offset, nbytes in runs:
            assert offset == at
            at += nbytes
        assert at == group.pool_bytes(7) == 7 * group.block_bytes


@pytest.mark.parametrize("order", ORDERS)
def test_codes_and_scales_of_a_block_lie_inside_its_runs(order: BlockOrder) -> None:
    for _, layout in every_layout(MIXED, order):
        for group in layout.groups:
            runs = {block: group.runs(block, 4) for block in range(4)}
            for block, first, end in pool_map(group, 4):
                assert any(r.offset <= first and end <= r.offset + r.nbytes for r in runs[block])


def test_a_block_moves_in_one_run_block_major_and_in_one_per_layer_layer_major() -> None:
    recipe = KVRecipe.uniform("int4", MIXED.head_dims)
    for order, count in ((BlockOrder.BLOCK_MAJOR, 1), (BlockOrder.LAYER_MAJOR, 2)):
        for group in plan_layout(MIXED, recipe, order=order).groups:
            runs = group.runs(3, 9)
            assert len(runs) == count
            assert sum(run.nbytes for run in runs) == group.block_bytes


@pytest.mark.parametrize("dims", [*HEAD_DIMS, *[(d, 64) for d in (60, 80, 96, 256)]], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_bytes_reported_are_bytes_allocated(dims: tuple[int, int], order: BlockOrder) -> None:
    model = geometry([dims, (64, 64), dims], windows=[None, 16, 16])
    for recipe, layout in every_layout(model, order):
        full = recipe.with_scales(static_scales(model.kv_heads)) if recipe.is_static else recipe
        cache = KVCache(replace(layout, recipe=full), num_blocks=[3, 2], device=torch.device("cpu"))
        pools = [cache.pool(0), cache.pool(1)]
        reported = [group.pool_bytes(n) for group, n in zip(layout.groups, (3, 2), strict=True)]
        assert [pool.numel() * pool.element_size() for pool in pools] == reported
        assert cache.nbytes == sum(reported)
        assert [pool.untyped_storage().nbytes() for pool in pools] == reported  # nothing beside the blocks


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_kv_bytes_per_token_are_what_pools_take_per_token(dims: tuple[int, int]) -> None:
    model = geometry([dims, (64, 64), dims], windows=[None, 16, None])
    for recipe, layout in every_layout(model):
        pools = sum(group.pool_bytes(10) for group in layout.groups)
        assert layout.kv_bytes_per_token * layout.block_size * 10 == pytest.approx(pools, rel=1e-12)
        bits = recipe.bits_per_element(model.kv_heads) * model.elements_per_token
        padding = Fraction(pools, 10 * layout.block_size) - bits / 8
        assert 0 <= padding * layout.block_size < 3 * 4 * ALIGNMENT  # 3 layers of 4 regions in use
        if layout.block_size == 32:
            assert padding == 0


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("block_size", [1, 13, 16, 17, 32])
def test_mixed_head_dims_need_no_ratio_between_the_block_sizes_of_layer_groups(
    kv: str, block_size: int
) -> None:
    """Block bytes of 256 + 80 against 60/48 + 192/128 elements have no whole ratio, scales or not."""
    recipe = KVRecipe.uniform(kv, MIXED.head_dims).with_scales(static_scales(MIXED.kv_heads))
    layout = plan_layout(MIXED, recipe, block_size=block_size)
    big, small = (group.block_bytes for group in layout.groups)
    assert big % small
    assert [group.block_size for group in layout.groups] == [block_size, block_size]
    cache = KVCache(layout, num_blocks=[3, 7], device=torch.device("cpu"))
    for layer, (k_dim, v_dim) in enumerate(MIXED.head_dims):
        blocks = (3, 7)[cache.group_of[layer]]
        k, v = torch.ones(block_size, 3, k_dim), torch.ones(block_size, 3, v_dim)
        cache.write(layer, k, v, torch.arange(block_size) + (blocks - 1) * block_size)  # the last block
        assert cache.layer(layer).k.codes.shape[:3] == (blocks, 3, block_size)


@pytest.mark.parametrize("block_size", [0, -1, 4097])
def test_a_block_size_out_of_range_is_refused(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"block_size must be 1 to 4096 tokens, got {block_size}"):
        plan_layout(MIXED, KVRecipe.uniform("int8", MIXED.head_dims), block_size=block_size)


@pytest.mark.parametrize(
    "dims", [[(64, 64)], [(64, 64)] * 3, [(64, 64), (64, 48)], [(64, 64), (48, 64)]], ids=str
)
def test_a_recipe_for_other_layers_is_refused(dims: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError, match=rf"the recipe is for {len(dims)} layers.*kvq calibrate"):
        plan_layout(geometry([(64, 64), (64, 64)]), KVRecipe.uniform("int8", dims))


def test_groups_are_full_attention_first_and_then_by_falling_window() -> None:
    model = geometry([(64, 64)] * 4, windows=[16, None, 1024, 16])
    layout = plan_layout(model, KVRecipe.uniform("int8", model.head_dims))
    assert [g.group.name for g in layout.groups] == ["full", "sliding-1024", "sliding-16"]
    assert [[x.geometry.index for x in g.layers] for g in layout.groups] == [[1], [2], [0, 3]]


def staged_layout(kv: str, block_size: int) -> KVLayout:
    """Of a model with full attention, windows of 64, and mixed head dimensions."""
    return plan_layout(MIXED, KVRecipe.uniform(kv, MIXED.head_dims), block_size=block_size)


@pytest.mark.parametrize("block_size", [16, 17, 32])
def test_a_staged_recipe_keeps_recent_tokens_and_sinks_in_bf16_groups_over_the_same_layers(
    block_size: int,
) -> None:
    layout = staged_layout("int4_mean/int2+sinks=20+recent=40", block_size)
    roles = [Role.SEALED] * 2 + [Role.RECENT] * 2 + [Role.SINKS] * 2
    assert [group.role for group in layout.groups] == roles
    assert layout.sealed == layout.groups[:2]
    assert [layout.staging_of(i) for i in (0, 1)] == list(layout.groups[2:4])
    assert [group.group.index for group in layout.groups] == [0, 1, 2, 3, 4, 5]
    sinks = -(-20 // block_size) * block_size
    windows, limits = [None, 64, *[40 + block_size] * 2, None, None], [*[None] * 4, sinks, sinks]
    assert [group.group.window for group in layout.groups] == windows
    assert [group.limit for group in layout.groups] == limits
    assert layout.exact == ExactTokens(sinks=sinks, recent=40)
    block_bytes = [group.block_bytes for group in layout.groups]
    held = {"windows": windows, "limits": limits, "block_bytes": block_bytes, "lag": 40, "state_group": None}
    assert layout.holding == held
    assert [group.holds_all for group in layout.groups] == [True, *[False] * 5]
    names = ["full", "sliding-64", *[f"recent-{40 + block_size}"] * 2, *[f"sinks-{sinks}"] * 2]
    assert [group.name for group in layout.groups] == names
    for group in layout.groups[2:]:
        sealed = layout.sealed[group.group.index % 2]
        assert [x.geometry for x in group.layers] == [x.geometry for x in sealed.layers]
        assert {x.formats.k.name for x in group.layers} | {x.formats.v.name for x in group.layers} == {"bf16"}
        for x in group.layers:
            dims = x.geometry.k_head_dim + x.geometry.v_head_dim
            assert x.k_codes.nbytes + x.v_codes.nbytes == 3 * block_size * 2 * dims
            assert not sum(region.nbytes for region in x.regions[2:])


def test_what_waits_or_not_decides_which_groups_there_are() -> None:
    roles = {kv: [group.role for group in staged_layout(kv, 32).groups[::2]] for kv in ("int4", *STAGED)}
    recent, sinks = [Role.SEALED, Role.RECENT], [Role.SEALED, Role.RECENT, Role.SINKS]
    assert list(roles.values()) == [[Role.SEALED], recent, recent, recent, sinks, sinks]
    assert staged_layout("int4_mean", 32).groups[2].group.window == 32  # a block, until it is full
    plain = staged_layout("int4", 32).holding
    assert (plain["windows"], plain["limits"], plain["lag"]) == ([None, 64], [None, None], 0)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_means_lie_once_per_block_and_head_behind_the_scales(dims: tuple[int, int], block_size: int) -> None:
    model = geometry([dims])
    for kv in ("int4_mean/int2_mean", "int8/int6_mean", "int4_gQ_mean_rot/int2_gQ_mean"):
        recipe = recipe_of(kv, [dims])
        layout = plan_layout(model, recipe, block_size=block_size)
        (layer,) = layout.sealed[0].layers
        end = 0
        for _, first, last in regions(layer):
            assert first % ALIGNMENT == 0
            assert 0 <= first - end < ALIGNMENT
            end = last
        formats = recipe.layers[0]
        for fmt, dim, region in ((formats.k, dims[0], layer.k_means), (formats.v, dims[1], layer.v_means)):
            groups = {48: 1, 60: 1, 64: 1, 80: 2, 96: 2, 128: 2, 192: 4, 256: 4}[dim]
            mean_bytes = dim // 2 + 2 * groups if fmt.mean else 0  # INT4 with a byte of scale and of minimum
            assert (region.row_bytes, region.nbytes) == (mean_bytes, 3 * mean_bytes)
        bits = recipe.bits_per_element(model.kv_heads, block_size) * model.elements_per_token
        padding = layout.sealed[0].block_bytes - bits / 8 * block_size
        assert 0 <= padding < 6 * ALIGNMENT
        assert layout.kv_bytes_per_token * block_size == layout.sealed[0].block_bytes


@pytest.mark.parametrize("kv", ["int4", *STAGED])
@pytest.mark.parametrize("block_size", [16, 17, 32])
def test_a_sequence_holds_every_block_with_a_token_that_is_still_looked_at(kv: str, block_size: int) -> None:
    layout = staged_layout(kv, block_size)
    for tokens in [*range(200), 1000]:
        held = 0
        for group in layout.groups:
            window, limit = group.group.window, group.limit
            kept = [
                at
                for at in range(tokens)
                if (window is None or at > tokens - window) and (limit is None or at < limit)
            ]  # the next query, at position `tokens`, looks at window - 1 keys before its own
            held += len({at // block_size for at in kept}) * group.block_bytes
        assert layout.sequence_bytes(tokens) == held, tokens
    whole = 100 * block_size  # the staging area's part stays what it is
    growth = layout.sequence_bytes(2 * whole) - layout.sequence_bytes(whole)
    assert growth == 100 * layout.sealed[0].block_bytes


@pytest.mark.parametrize("kv", ["int4", "int4_mean", "int8/int6+recent=40"])
def test_a_sequence_holds_the_bytes_of_the_blocks_that_the_manager_gives_it(kv: str) -> None:
    layout = staged_layout(kv, 16)
    holding = layout.holding
    blocks = BlockManager(
        num_blocks=[64] * len(layout.groups), block_size=16, windows=holding["windows"], lag=holding["lag"]
    )
    sequence = blocks.new_sequence()
    for tokens in range(1, 201):
        blocks.append([(sequence, 1)])
        blocks.take_orders()
        blocks.commit(sequence, [tokens])
        used = [len(table) - start for table, start in zip(sequence.tables, sequence.starts, strict=True)]
        held = sum(n * group.block_bytes for n, group in zip(used, layout.groups, strict=True))
        assert layout.sequence_bytes(tokens) == held, tokens
