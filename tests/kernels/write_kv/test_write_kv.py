"""write_kv: what is stored is decode(encode(x)), in its slots and nowhere else."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvq.errors import ConfigError
from kvq.kernels.codec import decode, encode
from kvq.kernels.gather_dense.reference import gather_dense
from kvq.kernels.write_kv.reference import write_kv as reference_write_kv
from kvq.layout import BlockOrder
from tests.kernels.backends import every_backend
from tests.kernels.kit import KINDS, POISON, Tables, poisoned_cache, rows_like_kv, slot_bytes, stored

write_kv: Any = None  # the implementation under test


backend = every_backend("write_kv", globals())


ORDERS = list(BlockOrder)
DIMS = [(60, 48), (48, 60), (64, 64)]  # three layers; regions of 60 elements leave padding
LENGTHS = [7, 1, 11]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kv", KINDS)
def test_written_rows_read_back_as_decode_of_encode_and_no_other_byte_changes(
    kv: str, order: BlockOrder
) -> None:
    cache = poisoned_cache(kv, DIMS, order=order)
    tables = Tables.scattered(LENGTHS, 5, 11)
    slots = [s for i, n in enumerate(LENGTHS) for s in tables.slots(i, 0, n)]
    for layer in (1, 0, 2):
        k_dim, v_dim = DIMS[layer]
        k, v = rows_like_kv(19, 3, k_dim, layer), rows_like_kv(19, 3, v_dim, layer + 9)
        before = cache.pool(0).clone()
        bad = write_kv(k, v, cache.layer(layer), torch.tensor(slots))
        assert not bad.any()
        changed = cache.pool(0) != before
        assert not (changed & ~slot_bytes(cache, layer, slots)).any()
        at = 0
        for i, length in enumerate(LENGTHS):
            table = torch.tensor(tables.blocks[i], dtype=torch.int32)
            ours = [x[0] for x in gather_dense(cache.layer(layer), table[None], 0, length)]
            for part, x, got in (("k", k, ours[0]), ("v", v, ours[1])):
                expected = stored(cache, layer, part, x[at : at + length]).transpose(0, 1)
                assert torch.equal(got, expected), part
            at += length


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kv", KINDS)
def test_every_byte_of_a_written_slot_is_replaced(kv: str, order: BlockOrder) -> None:
    slots = [7, 33, 18]
    k, v = rows_like_kv(3, 3, 60), rows_like_kv(3, 3, 48)
    pools = []
    for fill in (POISON, 0x00, 0x5A):
        cache = poisoned_cache(kv, [(60, 48), (60, 48)], order=order, fill=fill)
        write_kv(k, v, cache.layer(1), torch.tensor(slots))
        pools.append(cache.pool(0)[slot_bytes(cache, 1, slots)])
    assert pools[0].numel() == sum(
        3 * 3 * region.row_bytes
        for region in (
            cache.layout.groups[0].layers[1].k_codes,
            cache.layout.groups[0].layers[1].v_codes,
            cache.layout.groups[0].layers[1].k_scales,
            cache.layout.groups[0].layers[1].v_scales,
        )
    )
    assert torch.equal(pools[0], pools[1])
    assert torch.equal(pools[0], pools[2])


@pytest.mark.parametrize("kv", KINDS)
def test_k_and_v_may_have_any_strides(kv: str) -> None:
    k, v = rows_like_kv(7, 3, 60), rows_like_kv(7, 3, 48)
    slots = torch.tensor([3, 50, 21, 22, 8, 0, 54])
    plain = poisoned_cache(kv, [(60, 48)])
    write_kv(k, v, plain.layer(0), slots)
    heads_first = k.transpose(0, 1).contiguous().transpose(0, 1)  # as attention hands them over
    dim_first = v.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    inside = torch.full((7, 6, 120), math.nan)
    inside[:, ::2, ::2] = k
    for k_view, v_view in (
        (heads_first, dim_first),
        (inside[:, ::2, ::2], v[:, :, None].expand(7, 3, 2, 48)[:, :, 1]),
    ):
        assert torch.equal(k_view, k)
        assert torch.equal(v_view, v)
        cache = poisoned_cache(kv, [(60, 48)])
        write_kv(k_view, v_view, cache.layer(0), slots)
        assert torch.equal(cache.pool(0), plain.pool(0))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kv", ["int8", "int4", "fp8"])
def test_scales_lie_right_in_blocks_with_padding(kv: str, order: BlockOrder) -> None:
    """One KV head, 3 tokens, head_dim 60: no region ends on 16 bytes, so shapes don't give strides."""
    cache = poisoned_cache(kv, [(60, 60), (60, 60)], kv_heads=1, block_size=3, order=order)
    layer = cache.layout.groups[0].layers[0]
    assert layer.k_codes.nbytes % 16
    assert layer.k_scales.nbytes % 16
    scales = cache.layer(1).k.scales
    assert scales is not None
    assert scales.stride(0) > scales[0].numel()
    k, v = rows_like_kv(33, 1, 60), rows_like_kv(33, 1, 60, 1)
    slots = torch.randperm(33, generator=torch.Generator().manual_seed(0))
    write_kv(k, v, cache.layer(1), slots)
    everything = torch.arange(11, dtype=torch.int32)
    got_k, got_v = (x[0] for x in gather_dense(cache.layer(1), everything[None], 0, 33))
    assert torch.equal(got_k[:, slots], stored(cache, 1, "k", k).transpose(0, 1))
    assert torch.equal(got_v[:, slots], stored(cache, 1, "v", v).transpose(0, 1))
    untouched = ~slot_bytes(cache, 1, list(range(33)))
    assert (cache.pool(0)[untouched] == POISON).all()  # padding and the other layer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv", KINDS)
def test_half_precision_rows_are_quantized_from_their_exact_values(kv: str, dtype: torch.dtype) -> None:
    k, v = rows_like_kv(4, 3, 48).to(dtype), rows_like_kv(4, 3, 48, 1).to(dtype)
    slots = torch.tensor([9, 2, 30, 31])
    half, full = poisoned_cache(kv, [(48, 48)]), poisoned_cache(kv, [(48, 48)])
    write_kv(k, v, half.layer(0), slots)
    write_kv(k.float(), v.float(), full.layer(0), slots)
    assert torch.equal(half.pool(0), full.pool(0))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kv", KINDS)
def test_tokens_that_are_not_finite_are_flagged_and_stored_as_zero(kv: str, bad: float) -> None:
    cache = poisoned_cache(kv, [(60, 48)])
    k, v = rows_like_kv(6, 3, 60), rows_like_kv(6, 3, 48)
    clean_k, clean_v = k.clone(), v.clone()
    k[1, 2, 59], clean_k[1, 2, 59] = bad, 0.0
    v[4, 0, 0], clean_v[4, 0, 0] = bad, 0.0
    slots = torch.tensor([0, 1, 17, 18, 19, 20])
    flags = write_kv(k, v, cache.layer(0), slots)
    assert flags.dtype == torch.bool
    assert flags.tolist() == [False, True, False, False, True, False]
    clean = poisoned_cache(kv, [(60, 48)])
    assert not write_kv(clean_k, clean_v, clean.layer(0), slots).any()
    assert torch.equal(cache.pool(0), clean.pool(0))


@pytest.mark.parametrize("kv", KINDS)
def test_huge_but_finite_tokens_are_not_flagged_and_read_back_finite(kv: str) -> None:
    cache = poisoned_cache(kv, [(64, 64)])
    k = rows_like_kv(4, 3, 64).sign() * torch.tensor([65504.0, 1e5, 1e38, 3.4e38])[:, None, None]
    assert not write_kv(k, -k, cache.layer(0), torch.arange(4)).any()
    for rows in gather_dense(cache.layer(0), torch.tensor([[0]], dtype=torch.int32), 0, 4):
        assert torch.isfinite(rows).all()


def test_no_tokens_change_nothing() -> None:
    cache = poisoned_cache("int4", [(60, 48)])
    flags = write_kv(
        torch.empty(0, 3, 60), torch.empty(0, 3, 48), cache.layer(0), torch.empty(0, dtype=torch.int64)
    )
    assert flags.shape == (0,)
    assert (cache.pool(0) == POISON).all()


@pytest.mark.parametrize("kv", KINDS)
def test_a_token_is_stored_alike_whatever_it_is_written_with(kv: str) -> None:
    k, v = rows_like_kv(9, 3, 60), rows_like_kv(9, 3, 48)
    slots = torch.tensor([5, 6, 7, 8, 9, 0, 44, 43, 42])
    together, apart = poisoned_cache(kv, [(60, 48)]), poisoned_cache(kv, [(60, 48)])
    write_kv(k, v, together.layer(0), slots)
    for chunk in ([8], [0, 1, 2], [3, 5, 7], [4, 6]):
        write_kv(k[chunk], v[chunk], apart.layer(0), slots[chunk])
    assert torch.equal(together.pool(0), apart.pool(0))


@pytest.mark.parametrize("group", [5, 6, 10, 15, 30, 60])
def test_clipped_2_bit_groups_are_those_of_the_reference_bit_for_bit(group: int) -> None:
    """Groups of 10 end inside the quarters of 15 that a byte's codes come from."""
    cache = poisoned_cache(f"int2_g{group}_rot/int2_g{group}", [(60, 60)])
    kv = cache.layer(0)
    kv = replace(kv, formats=replace(kv.formats, k_clip=0.75, v_clip=0.85))
    k, v = rows_like_kv(9, 3, 60), rows_like_kv(9, 3, 60, 1)
    v[3] = 1.25  # constant groups
    slots = torch.tensor([7, 33, 18, 0, 54, 21, 22, 23, 9])
    assert not write_kv(k, v, kv, slots).any()
    ours = cache.pool(0).clone()
    cache.pool(0).fill_(POISON)
    reference_write_kv(k, v, kv, slots)
    assert torch.equal(cache.pool(0), ours)
    gathered = gather_dense(kv, torch.tensor([[1]], dtype=torch.int32), 2, 3)[1]  # slot 7
    assert torch.equal(gathered[0, :, 0], decode(*encode(v[0], kv.formats.v, clip=0.85), kv.formats.v))


@pytest.mark.parametrize("kv", ["int4_per_channel/int4", "int4_mean/bf16"])
def test_formats_of_whole_blocks_are_refused_in_cpp(kv: str, backend: str) -> None:
    if not backend.startswith("cpu"):
        pytest.skip("told by the C++ kernel's wrapper")
    cache = poisoned_cache(kv, [(64, 64)])
    x = rows_like_kv(2, 3, 64)
    with pytest.raises(ConfigError, match="a block at a time"):
        write_kv(x, x, cache.layer(0), torch.tensor([0, 1]))
