"""seal: blocks that became old enough, as the encoder of whole blocks makes them, and nothing else."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.formats import KVFormat
from kvq.kernels import SequenceBatch, StagedBatch
from kvq.kernels.codec import encode_block
from kvq.kernels.paged import PagedRows
from kvq.kernels.write_kv.reference import write_kv
from tests.kernels.backends import every_backend
from tests.kernels.kit import POISON, Tables, poisoned_cache, rows_like_kv

seal: Any = None  # the implementation under test


backend = every_backend("seal", globals())


SIZE = 5
STAGED = (
    *("int4_mean+recent=7", "int3_mean+sinks=4+recent=9", "int2_mean+sinks=11+recent=0"),
    *("int6_mean/int5_mean+recent=1", "int8/int4_g8_mean+sinks=1+recent=5", "fp8_per_head/int2_g16_mean"),
    *("int4_per_channel/int4", "int8_per_channel/int8+recent=4", "int3_per_channel/int2_per_channel+sinks=4"),
    *("int5_per_channel/int6_per_channel", "int4_per_channel_rot/fp8", "int2_per_channel/int4_mean"),
    *("int4_g24_s8_mean/bf16+recent=7", "int4+sinks=4+recent=8", "fp32+recent=6", "int3_mean_rot+recent=7"),
    *(
        "int4_per_channel/int4+recent=7",
        "int8_per_channel/int8+sinks=4+recent=9",
        "int3_per_channel/int4_mean",
    ),
)
# Of every width, K's and V's.
CHANNELS = (
    "int4_per_channel/int2_per_channel",
    "int3_per_channel/int6_per_channel",
    "int8_per_channel/int5_per_channel",
)


class Staged:
    """Two sequences whose K and V wait in bf16; everything else is poison."""

    def __init__(
        self, kv: str, lengths: tuple[int, ...] = (43, 29), dims: tuple[int, int] = (48, 64)
    ) -> None:
        self.cache = poisoned_cache(kv, [dims], num_blocks=30, block_size=SIZE)
        self.lengths = lengths
        self.kv = self.cache.stores[0].kv
        self.tables = [Tables.scattered(list(lengths), SIZE, 30, seed) for seed in range(3)]
        self.k = [rows_like_kv(n, 3, dims[0], i).bfloat16() for i, n in enumerate(lengths)]
        self.v = [rows_like_kv(n, 3, dims[1], i + 5).bfloat16() for i, n in enumerate(lengths)]
        for i, n in enumerate(lengths):
            write_kv(self.k[i], self.v[i], self.kv.recent, torch.tensor(self.tables[1].slots(i, 0, n)))

    def batch(self, query_lens: list[int], context_lens: list[int]) -> StagedBatch:
        """The step that ends at those lengths."""
        sealed, recent, sinks = (tables.batch(query_lens, context_lens) for tables in self.tables)
        return StagedBatch(sealed=sealed, recent=recent, sinks=None if self.kv.sinks is None else sinks)

    def expected(self, ends: list[int]) -> list[Tensor]:
        """The pools once blocks up to `ends` are sealed."""
        other = Staged(self.cache.layout.recipe.name, self.lengths)
        exact, formats = other.kv.exact, other.kv.sealed.formats
        for i, end in enumerate(ends):
            for block in range(max(0, end - exact.recent) // SIZE):
                own = slice(block * SIZE, (block + 1) * SIZE)
                k, v = (x[i][own].transpose(0, 1) for x in (self.k, self.v))
                if block * SIZE < exact.sinks:
                    target = other.tables[2].blocks[i][block]
                    other.kv.sinks.k.codes[target], other.kv.sinks.v.codes[target] = k, v
                else:
                    target = other.tables[0].blocks[i][block]
                    put(other.kv.sealed.k, formats.k, k, target)
                    put(other.kv.sealed.v, formats.v, v, target)
        return other.pools()

    def pools(self) -> list[Tensor]:
        """The bytes of everything."""
        return [self.cache.pool(i) for i in range(len(self.cache.num_blocks))]


def put(rows: PagedRows, fmt: KVFormat, x: Tensor, block: int) -> None:
    """Store a block [heads, size, dim] as the codec encodes it."""
    static = None if rows.static_scale is None else rows.static_scale[:, None, None]
    codes, scales, means = encode_block(x, fmt, static)
    rows.codes[block] = codes
    if scales is not None:
        rows.scales[block, :, : scales.shape[1]] = scales
    if means is not None:
        rows.means[block] = means


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kv", STAGED)
def test_full_blocks_followed_by_recent_tokens_are_sealed_and_no_other_byte_changes(kv: str) -> None:
    staged = Staged(kv)
    seal(staged.kv, staged.batch([43, 29], [43, 29]))
    assert same(staged.pools(), staged.expected([43, 29]))
    assert not same(staged.pools(), Staged(kv).pools())


@pytest.mark.parametrize("kv", STAGED[1:4])
def test_steps_of_any_size_seal_the_same_and_twice_changes_nothing(kv: str) -> None:
    staged = Staged(kv)
    done = [0, 0]
    for step in ([1, 0], [12, 1], [0, 13], [30, 14], [0, 1]):
        done = [a + b for a, b in zip(done, step, strict=True)]
        for _ in range(2):
            seal(staged.kv, staged.batch(step, done))
        assert same(staged.pools(), staged.expected(done))
    assert done == [43, 29]


@pytest.mark.parametrize("kv", ["int4_mean/int2_g16_mean", *CHANNELS])
def test_rows_that_overflow_sums_and_constant_ones_are_those_of_the_reference(kv: str) -> None:
    staged = Staged(kv)
    staged.k[0][:10] = 3e38
    staged.k[0][3] = -3e38
    staged.v[0][:20] = 1.25
    staged.v[1][:5] = 0
    for i, n in enumerate(staged.lengths):
        write_kv(staged.k[i], staged.v[i], staged.kv.recent, torch.tensor(staged.tables[1].slots(i, 0, n)))
    want = staged.expected([43, 29])
    seal(staged.kv, staged.batch([43, 29], [43, 29]))
    assert torch.equal(staged.pools()[0], want[0])


@pytest.mark.parametrize("kv", [*CHANNELS, "int4_per_channel_rot/int8_per_channel_rot"])
def test_channels_of_any_range_and_offset_have_their_bytes_in_every_width(kv: str) -> None:
    """Partners share their bits in every way; a range is next to nothing beside its offset, or all zeros."""
    staged = Staged(kv + "+recent=5")
    source = torch.Generator().manual_seed(7)
    for rows in (staged.k, staged.v):
        dim = rows[0].shape[-1]
        size = torch.logspace(-3, 2, dim)[torch.randperm(dim, generator=source)]
        size[3], size[5] = 0.0, 1e-9
        offset = (
            torch.randn(dim, generator=source) * torch.tensor([0.0, 1.0, 100.0, 1e6]).repeat(dim // 4) * size
        )
        for i, x in enumerate(rows):
            rows[i] = (x.float() * size + offset).bfloat16()
    for i, n in enumerate(staged.lengths):
        write_kv(staged.k[i], staged.v[i], staged.kv.recent, torch.tensor(staged.tables[1].slots(i, 0, n)))
    seal(staged.kv, staged.batch([43, 29], [43, 29]))
    found = 0
    for i, end in enumerate(staged.lengths):
        for block in range((end - 5) // SIZE):
            target = staged.tables[0].blocks[i][block]
            for part, x in (("k", staged.k[i]), ("v", staged.v[i])):
                paged = getattr(staged.kv.sealed, part)
                rows = x[block * SIZE : (block + 1) * SIZE].transpose(0, 1)
                codes, scales, _ = encode_block(rows, getattr(staged.kv.sealed.formats, part))
                assert torch.equal(paged.codes[target], codes)
                assert torch.equal(paged.scales[target, :, :1], scales)
                found += 1
    assert found == 22


def test_a_block_that_two_sequences_share_is_sealed_once_for_both() -> None:
    staged = Staged("int3_mean+recent=4", lengths=(24, 24))
    for tables in staged.tables:
        tables.blocks[1][:4] = tables.blocks[0][:4]
    seal(staged.kv, staged.batch([24, 24], [24, 24]))
    assert same(staged.pools()[:1], staged.expected([24, 0])[:1])


@pytest.mark.parametrize("bad", [-1, 30, 1 << 30])
@pytest.mark.parametrize("which", ["sealed", "recent", "sinks"])
def test_tables_are_checked_before_anything_is_written(which: str, bad: int, backend: str) -> None:
    if backend in ("reference", "triton"):
        pytest.skip("no table is checked there")
    staged = Staged("int4_mean+sinks=4+recent=9")
    batch = staged.batch([43, 29], [43, 29])
    part: SequenceBatch = getattr(batch, which)
    part.tables[1, 0 if which == "sinks" else 3] = bad
    with pytest.raises(IndexError, match="outside the pool"):
        seal(staged.kv, batch)
    narrow = replace(part, tables=part.tables[:, : 0 if which == "sinks" else 3].clone())
    fresh = replace(staged.batch([43, 29], [43, 29]), **{which: narrow})
    with pytest.raises(IndexError, match="outside the pool"):
        seal(staged.kv, fresh)
    assert (staged.pools()[0] == POISON).all()
    assert (staged.pools()[2] == POISON).all()
