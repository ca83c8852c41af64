"""attend_staged: sealed and recent blocks in one launch are their parts, merged by the references."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.kernels import AttentionOptions, SequenceBatch, StagedBatch
from kvq.kernels.attend.options import Part, parts_of
from kvq.kernels.attend.reference import attend
from kvq.kernels.attend.triton import attend as kernel
from kvq.kernels.attend.triton import step
from kvq.kernels.gpu import shapes
from kvq.kernels.merge_partials.reference import merge_partials
from kvq.kernels.paged import PagedKV, StagedKV
from kvq.kernels.seal.reference import seal
from kvq.kernels.write_kv.reference import write_kv
from tests.kernels.kit import Tables, poisoned_cache, poisoned_memory, rows_like_kv

SINKS = torch.tensor([0.0, 4.0, -3.0, 9.0, 1.0, float("-inf")])
NOWHERE = (1 << 31) - 1
CONTEXTS = [130, 64, 33, 5, 96]  # sealed to the end without recent tokens, and none sealed


class Staged:
    """Sequences whose old blocks are sealed, in a poisoned cache of staged blocks."""

    def __init__(self, kv: str, dims: tuple[int, int], block_size: int, kv_heads: int = 2) -> None:
        need = sum(-(-n // block_size) for n in CONTEXTS) + 2
        cache = poisoned_cache(
            kv, [dims], kv_heads=kv_heads, q_heads=6, block_size=block_size, num_blocks=need
        )
        self.kv: StagedKV = cache.stores[0].kv
        self.size = block_size
        self.tables = [Tables.scattered(CONTEXTS, block_size, need, seed) for seed in range(3)]
        for i, n in enumerate(CONTEXTS):
            rows = (rows_like_kv(n, kv_heads, dim, i + 9 * dim).bfloat16() for dim in dims)
            write_kv(*rows, self.kv.recent, torch.tensor(self.tables[1].slots(i, 0, n)))
        seal(self.kv, self.batch(CONTEXTS))

    def batch(self, new: list[int]) -> StagedBatch:
        sealed, recent, sinks = (tables.batch(new, CONTEXTS) for tables in self.tables)
        return StagedBatch(sealed=sealed, recent=recent, sinks=None if self.kv.sinks is None else sinks)

    def expected(self, q: Tensor, new: list[int], options: AttentionOptions) -> tuple[Tensor, Tensor]:
        own, results = options.without_sinks(), []
        for kv, batch, part in self.forms(new):
            results.append(attend(q, kv, batch, own.of_part(part)))
        outs, lses = map(torch.stack, zip(*results, strict=True))
        return merge_partials(outs, lses, options.sinks)

    def forms(self, new: list[int]) -> list[tuple[PagedKV, SequenceBatch, Part]]:
        """Blocks of every form, the step as they see it, and their part of the keys."""
        batch, parts = self.batch(new), parts_of(self.kv.exact, self.size)
        blocks = self.kv.sealed, self.kv.recent, self.kv.sinks
        batches = batch.sealed, batch.recent, batch.sinks
        return [form for form in zip(blocks, batches, parts, strict=True) if form[0] is not None]

    def seen_only(self, new: list[int], *, is_captured: bool) -> StagedBatch:
        """The step with nonsense in its tables where no query looks; of a graph, it knows only limits."""
        found = []
        for _, own, part in self.forms(new):
            tables = own.tables.clone()
            for table, count, context in zip(tables, new, CONTEXTS, strict=True):
                oldest, end = part.oldest(context - count), part.end(context - 1) if count else 0
                table[: oldest // self.size] = NOWHERE
                table[max(0, -(-end // self.size)) :] = NOWHERE
            lens = own.device_lens()
            limits = {"context_lens": (4096,) * len(CONTEXTS), "lens": lens, "is_captured": True}
            found.append(replace(own, tables=tables, **(limits if is_captured else {})))
        sealed, recent, sinks = (*found, None)[:3]
        return StagedBatch(sealed=sealed, recent=recent, sinks=sinks)


def compare(staged: Staged, new: list[int], *, is_captured: bool = True, **more: Any) -> None:
    """Outputs relative to the largest, log-sum-exps absolutely."""
    dim, options = staged.kv.sealed.formats.k_head_dim, AttentionOptions(scale=0.2, **more)
    q = rows_like_kv(sum(new), 6, dim, 3)
    want, want_lse = staged.expected(q, new, options)
    out, lse = kernel.attend_staged(q, staged.kv, staged.seen_only(new, is_captured=is_captured), options)
    assert float((out - want).abs().max() / want.abs().max()) < 1e-4
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.daily(7)
@pytest.mark.parametrize(
    "more", [{}, {"window": 41}, {"sinks": SINKS, "softcap": 8.0}, {"chunk": 50, "sinks": SINKS}], ids=str
)
@pytest.mark.parametrize("new", [[1, 1, 1, 1, 1], [2, 0, 7, 5, 1], [1, 20, 33, 1, 60]], ids=str)
@pytest.mark.parametrize(
    ("kv", "dims", "block_size"),
    [
        ("int4_per_channel/int4", (64, 64), 32),
        ("int4_per_channel/int4+recent=40", (64, 48), 16),
        ("int8_per_channel/int8+recent=7", (64, 64), 32),
        ("int3_per_channel/int3", (128, 64), 64),
        ("int4_mean", (64, 64), 32),
        ("int3_mean+recent=70", (64, 64), 16),
        ("int4+recent=9", (48, 64), 24),
        ("bf16+recent=5", (60, 60), 5),
        ("int4+sinks=3+recent=9", (48, 64), 24),
        ("int3_mean+sinks=33+recent=8", (64, 64), 16),
        ("int4_per_channel/int4+sinks=40", (64, 64), 32),
    ],
)
def test_sealed_and_recent_blocks_in_one_launch_are_their_parts_merged(
    kv: str,
    dims: tuple[int, int],
    block_size: int,
    new: list[int],
    more: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces of old keys, of young ones and of both; drafts whose rows see the same key in two forms."""
    monkeypatch.setattr(shapes, "_LEAST_SPLIT", 32)
    monkeypatch.setattr(step, "_MERGED_TOGETHER", 2)  # parts are merged in several rounds
    monkeypatch.setattr(step, "_MERGED_ROWS", (1, 2))
    poisoned_memory(monkeypatch)
    compare(Staged(kv, dims, block_size), new, **more)


@pytest.mark.parametrize("kv", ["int4_per_channel/int4", "int4_mean+recent=40"])
def test_short_contexts_take_one_launch(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = Staged(kv, (64, 64), 32)
    poisoned_memory(monkeypatch)
    compare(staged, [1, 1, 1, 1, 1], is_captured=False)
    names = [run.__name__ for run in _launches(monkeypatch, staged)]
    assert names == ["attend_kernel"]
    monkeypatch.setattr(shapes, "_LEAST_SPLIT", 32)
    assert [run.__name__ for run in _launches(monkeypatch, staged)] == ["attend_kernel", "merge_kernel"]


def _launches(monkeypatch: pytest.MonkeyPatch, staged: Staged) -> list[Any]:
    """Kernels that a step of one token a sequence launches in a layer, once its list is made."""
    batch, options = staged.seen_only([1] * 5, is_captured=False), AttentionOptions(scale=0.2)
    q, found = rows_like_kv(5, 6, 64, 3), []
    kernel.attend_staged(q, staged.kv, batch, options)
    with monkeypatch.context() as patched:
        patched.setattr("kvq.kernels.gpu.launch.Bound.look", lambda self, *_: found.append(self._kernel))
        kernel.attend_staged(q, staged.kv, batch, options)
    return found
