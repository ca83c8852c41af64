"""Dequantizing for a batch: the codec's values in fewer operations, over poisoned blocks."""

import pytest
import torch

from kvq.cache.dense_attention import attend_by_torch
from kvq.cache.few_rows import can_write_few, write_few
from kvq.cache.int4 import decode_int4, encode_int4, is_power_of_two, unrotate_int4
from kvq.cache.kv_cache import KVCache
from kvq.cache.scratch import DenseScratch
from kvq.formats import Grouped, parse_format
from kvq.kernels import SequenceBatch
from kvq.kernels.attend.reference import attend
from kvq.kernels.codec import decode, encode, rotate
from tests.kernels.kit import KINDS, poisoned_cache, rows_like_kv, slot_bytes, unrotated

INT4 = [("int4", 16), ("int4", 48), ("int4", 64), ("int4", 80), ("int4", 128), ("int4", 256)]
GROUPS = [("int4_g32_rot", 128), ("int4_g8_rot", 64), ("int4_g128_rot", 128)]


def _rows(dim: int) -> torch.Tensor:
    x = rows_like_kv(7, 3, dim) * torch.logspace(-6, 6, 21).view(7, 3, 1)
    x[0, 0], x[1, 1], x[2, 2] = 0.0, 5.0, x[2, 2] + 1000
    x[3, 0, 0] = 3e38
    return x


@pytest.mark.parametrize(("name", "dim"), INT4 + GROUPS)
def test_few_int4_rows_get_the_codecs_codes_scales_and_values(name: str, dim: int) -> None:
    fmt = parse_format(name, dim)
    assert isinstance(fmt.scale, Grouped)
    x = _rows(dim)
    codes, scales = encode(x, fmt)
    assert scales is not None
    mine = encode_int4(x, fmt.scale.group_size)
    assert torch.equal(mine[0], codes)
    assert torch.equal(mine[1], scales)
    rotated, dense = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    decode_int4(rotated, codes, scales)
    assert torch.equal(rotated, decode(codes, scales, fmt))
    if is_power_of_two(dim):
        unrotate_int4(dense, codes, scales)
        want = rotate(rotated)
        error = (dense - want).abs().amax(dim=-1) / want.abs().amax(dim=-1).clamp(min=1e-30)
        assert error.max() < 2e-6


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_writing_few_rows_leaves_the_bytes_that_write_kv_leaves(block_size: int) -> None:
    caches = [poisoned_cache("int4", [(60, 60)], block_size=block_size, num_blocks=40) for _ in range(2)]
    k, v = rows_like_kv(9, 3, 60, 1), rows_like_kv(9, 3, 60, 2)
    k[4, 1, 7], v[6, 0, 3] = float("nan"), float("inf")
    slots = torch.randperm(40 * block_size, generator=torch.Generator().manual_seed(0))[:9]
    assert can_write_few(caches[0].layer(0))
    bad = write_few(k, v, caches[0].layer(0), slots)
    assert torch.equal(bad, caches[1].write(0, k, v, slots))
    assert bad.nonzero().flatten().tolist() == [4, 6]
    assert torch.equal(caches[0].pool(0), caches[1].pool(0))
    assert slot_bytes(caches[0], 0, slots.tolist()).any()


def _filled(
    kv: str, dims: tuple[int, int], lengths: list[int], news: list[int], q_heads: int = 6
) -> tuple[KVCache, SequenceBatch, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A poisoned cache with sequences of those lengths in shuffled blocks of 5."""
    needs = [-(-length // 5) for length in lengths]
    cache = poisoned_cache(kv, [dims], q_heads=q_heads, num_blocks=sum(needs) + 3)
    order = torch.randperm(sum(needs) + 3, generator=torch.Generator().manual_seed(1)).tolist()
    tables = torch.zeros(len(lengths), max(needs), dtype=torch.int32)
    rows = []
    for i, (length, need) in enumerate(zip(lengths, needs, strict=True)):
        mine = [order.pop() for _ in range(need)]
        tables[i, :need] = torch.tensor(mine)
        k, v = rows_like_kv(length, 3, dims[0], i), rows_like_kv(length, 3, dims[1], i + 50)
        slots = torch.tensor([mine[at // 5] * 5 + at % 5 for at in range(length)])
        cache.write(0, k, v, slots)
        rows.append((k, v))
    batch = SequenceBatch(
        query_lens=tuple(news),
        context_lens=tuple(lengths),
        tables=tables,
        slots=torch.zeros(0, dtype=torch.int64),
    )
    return cache, batch, rows


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("dims", [(64, 48), (60, 80)])
def test_gathered_rows_are_what_was_stored_from_any_position(kv: str, dims: tuple[int, int]) -> None:
    cache, batch, rows = _filled(kv, dims, [23, 23, 23], [1, 1, 1])
    scratch = DenseScratch(torch.device("cpu"))
    for start in (0, 4, 7, 22):
        got = scratch.gather(
            cache.layer(0), batch.tables, start, 23, dtypes=(torch.float32, torch.float32), unrotate=True
        )
        for part, x in zip("kv", got, strict=True):
            index = "kv".index(part)
            want = torch.stack([unrotated(cache, 0, part, row[index]) for row in rows]).transpose(1, 2)
            assert torch.allclose(x, want[:, :, start:], atol=1e-5 * float(want.abs().max()))
    held = scratch.nbytes
    assert held >= 3 * 3 * 25 * sum(dims) * 4
    scratch.gather(cache.layer(0), batch.tables, 0, 9, dtypes=(torch.float32,) * 2, unrotate=False)
    assert scratch.nbytes == held, "a shorter context needs no new memory"


CASES = {
    "decode": ([23, 23], [1, 1], {}),
    "draft": ([23, 23], [4, 4], {}),
    "prefill": ([23, 23], [23, 23], {}),
    "long chunk": ([43, 43], [21, 21], {}),
    "window": ([43, 43], [1, 1], {"window": 9}),
    "window draft": ([43, 43], [5, 5], {"window": 9}),
    "window chunk": ([43, 43], [20, 20], {"window": 9}),
    "uneven": ([23, 7, 40], [1, 1, 1], {}),
    "padded prefill": ([23, 7, 16], [23, 7, 16], {}),
    "softcap": ([23, 23], [2, 2], {"softcap": 3.0}),
    "sinks": ([23, 23], [2, 2], {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 4.0, 1.0])}),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(("kv", "dims"), [("int4", (64, 64)), ("int4", (128, 60)), ("int8", (48, 60))])
def test_attention_by_torch_is_the_references(kv: str, dims: tuple[int, int], case: str) -> None:
    lengths, news, options = CASES[case]
    cache, batch, _ = _filled(kv, dims, lengths, news)
    count = max(news)
    q = torch.randn(len(lengths), 6, count, dims[0], generator=torch.Generator().manual_seed(9))
    settings = {"scale": 0.2, "window": None, "softcap": None, "sinks": None} | options
    out = attend_by_torch(DenseScratch(q.device), q, cache.layer(0), batch, **settings)
    if out is None:
        assert kv == "int8", "int4 steps of a few tokens know every kind of attention"
        return
    packed = torch.cat([q[i, :, count - new :].transpose(0, 1) for i, new in enumerate(news)])
    want = attend(packed, cache.layer(0), batch, **settings)[0]
    got = torch.cat([out[i, count - new :] for i, new in enumerate(news)])
    assert torch.allclose(got, want, atol=2e-6 * float(want.abs().max()) + 1e-6)
    for i, new in enumerate(news):
        assert not out[i, : count - new].any(), "padding gives zero"
