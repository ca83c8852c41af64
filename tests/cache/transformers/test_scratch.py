"""Dequantizing for a batch, and torch's attention over it, on poisoned blocks."""

import pytest
import torch

from kvq.cache.kv_cache import KVCache
from kvq.cache.transformers.scratch import DenseScratch
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.attend.reference import attend
from tests.kernels.kit import KINDS, poisoned_cache, rows_like_kv, unrotated


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


@pytest.mark.parametrize("kv", [*KINDS, "int4_gQ_rot", "int6"])
@pytest.mark.parametrize("dims", [(64, 48), (60, 80)])
def test_gathered_rows_are_what_was_stored_from_any_position(kv: str, dims: tuple[int, int]) -> None:
    cache, batch, rows = _filled(kv, dims, [23, 23, 23], [1, 1, 1])
    scratch = DenseScratch(cache, torch.device("cpu"))
    for start in (0, 4, 7, 22):
        got = scratch.gather(0, batch.tables, range(start, 23), dtypes=(torch.float32,) * 2, unrotate=True)
        for part, x in zip("kv", got, strict=True):
            index = "kv".index(part)
            want = torch.stack([unrotated(cache, 0, part, row[index]) for row in rows]).transpose(1, 2)
            assert torch.allclose(x, want[:, :, start:], atol=1e-5 * float(want.abs().max()))
    held = scratch.nbytes
    assert held >= 3 * 3 * 23 * sum(dims) * 4
    scratch.gather(0, batch.tables, range(9), dtypes=(torch.float32,) * 2, unrotate=False)
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
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(
    ("kv", "dims"), [("int4", (64, 64)), ("int4_g64_rot", (64, 64)), ("int4", (128, 60)), ("int8", (48, 60))]
)
def test_attention_by_torch_is_the_references(kv: str, dims: tuple[int, int], case: str) -> None:
    lengths, news, options = CASES[case]
    cache, batch, _ = _filled(kv, dims, lengths, news)
    count = max(news)
    q = torch.randn(len(lengths), 6, count, dims[0], generator=torch.Generator().manual_seed(9))
    settings = AttentionOptions(scale=0.2, **options)
    out = DenseScratch(cache, q.device).attend(0, q, batch, settings)
    assert out is not None
    packed = torch.cat([q[i, :, count - new :].transpose(0, 1) for i, new in enumerate(news)])
    want = attend(packed, cache.layer(0), batch, settings)[0]
    got = torch.cat([out[i, count - new :] for i, new in enumerate(news)])
    assert torch.allclose(got, want, atol=2e-6 * float(want.abs().max()) + 1e-6)
    for i, new in enumerate(news):
        assert not out[i, : count - new].any(), "padding gives zero"
