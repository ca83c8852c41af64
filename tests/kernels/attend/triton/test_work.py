"""The work lists of Triton attention: what they must hold, and how well they fill a GPU, simulated."""

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvq.bench.kernels.workload import lengths
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.attend.triton import attend as kernel
from kvq.kernels.attend.triton import step
from kvq.kernels.attend.triton.step import _Cut, work_list
from kvq.kernels.gpu.shapes import TileShape, least_split
from tests.kernels.attend.triton.test_attend import filled
from tests.kernels.kit import poisoned_memory

MULTIPROCESSORS, KV_HEADS = 132, 8
CUT = _Cut(
    share=4, rows=16, keys=64, fewest=1, most=64, window=None, pieces=198, least=256
)  # of an int4 decode step on an H100 or H200, 8 KV heads
WIDE = TileShape(rows=64, keys=64, warps=4, stages=5)
EXTEND = CUT._replace(rows=64, fewest=65, most=1 << 30, pieces=99, least=least_split(WIDE))
RESIDENT = (2, 3, 4)  # programs of a multiprocessor at a time
MIXED = lengths("128-32768", 128, 0)
START, EMPTY = 64, 16  # what beginning a program costs, and one without work, in keys: assumed


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned_memory(monkeypatch)


def batch_of(new: Sequence[int], contexts: Sequence[int], limit: int | None = None) -> SequenceBatch:
    """A step whose host knows only `limit` of the contexts, as a captured graph's does."""
    batch = SequenceBatch.of([[0]] * len(new), [0] * sum(new), new, contexts, torch.device("cpu"))
    limits = batch.context_lens if limit is None else (limit,) * len(new)
    return replace(batch, context_lens=limits, lens=batch.device_lens(), is_captured=limit is not None)


def tiles(batch: SequenceBatch, cut: _Cut) -> Iterator[tuple[tuple[int, ...], range]]:
    """Sequence, row, first token, new tokens and context of every tile, and its keys, by definition."""
    assert batch.lens is not None
    for i, (first, new, context) in enumerate(zip(*batch.lens.tolist(), strict=True)):
        rows = new * cut.share
        for row in range(0, rows if cut.fewest <= rows <= cut.most else 0, cut.rows):
            last = (min(row + cut.rows, rows) - 1) // cut.share
            end = context - new + last + 1
            oldest = 0
            if cut.window is not None:
                oldest = max(0, context - new + row // cut.share - cut.window + 1) // cut.keys * cut.keys
            yield (i, row, first, new, context), range(oldest, end)


def pieces_of(batch: SequenceBatch, cut: _Cut) -> list[int]:
    """Keys of the list's items in their order, of unused ones -1."""
    found = work_list(batch, cut)
    assert found is not None
    return [max(0, end - begin * cut.keys) if i >= 0 else -1 for i, *_, begin, end, _ in found.items.tolist()]


def check(batch: SequenceBatch, cut: _Cut) -> int:
    """Every key of every tile is in one piece, every piece in its place; returns the number of parts."""
    found = work_list(batch, cut)
    wanted = dict(tiles(batch, cut))
    if found is None:
        assert not wanted
        return 0
    items = [item for item in found.items.tolist() if item[0] >= 0]
    assert all(item[0] == -1 for item in found.items.tolist()[len(items) :]), "what is used comes first"
    parts: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for *tile, begin, end, part in items:
        parts.setdefault(tuple(tile), []).append((part, begin * cut.keys, end))
    assert parts.keys() == wanted.keys()
    merged = {} if found.merged is None else {tuple(x[2:]): x[:2] for x in found.merged.tolist() if x[0] > 0}
    numbers: list[int] = []
    for tile, ranges in parts.items():
        keys = [key for _, begin, end in sorted(ranges) for key in range(begin, end)]
        assert keys == list(wanted[tile])
        if len(ranges) == 1:
            assert ranges[0][0] == -1
            continue
        count, first = merged.pop(tile[1:4])
        assert sorted(part for part, *_ in ranges) == list(range(first, first + count))
        numbers += range(first, first + count)
    assert not merged
    assert sorted(numbers) == list(range(len(numbers)))
    assert len(numbers) <= found.parts
    sizes = [max(0, -(-(end - begin * cut.keys) // cut.keys)) for *_, begin, end, _ in items]
    average = sum(sizes) / max(1, min(sum(sizes) * cut.keys // cut.least, cut.pieces))
    assert max(sizes) <= 2 * average
    assert all(b <= a + average / 8 + 1 for a, b in pairwise(sizes)), "largest first"
    return len(numbers)


@pytest.mark.parametrize("seed", range(6))
def test_every_key_of_every_tile_is_in_one_piece(seed: int) -> None:
    draw = random.Random(seed)
    split = 0
    for _ in range(4):
        new = [draw.choice([0, 1, 1, 1, 2, 5, 17, 40]) for _ in range(draw.choice([1, 2, 7, 70]))]
        contexts = [n + draw.choice([0, 3, 100, 2000]) for n in new]
        cut = CUT._replace(
            share=draw.choice([1, 3, 4]),
            keys=draw.choice([16, 32]),
            window=draw.choice([None, 1, 50, 700]),
            pieces=draw.choice([3, 20]),
            least=draw.choice([32, 96]),
        )
        batch = batch_of(new, contexts, limit=draw.choice([None, 4096]))
        split += check(batch, cut)
        split += check(batch, cut._replace(rows=32, fewest=cut.most + 1, most=1 << 30))
    assert split > 0


def test_a_list_may_be_longer_than_what_is_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_BLOCK", 16)
    new = [1, 3, 9, 1, 12] * 8
    assert check(batch_of(new, [100 * n for n in new]), CUT._replace(pieces=90, least=64)) > 0


def test_short_contexts_need_no_second_launch() -> None:
    found = work_list(batch_of([1, 1], [256, 30]), CUT)
    assert found is not None
    assert found.merged is None
    assert found.parts == 0


class OnlyEmpty(TorchDispatchMode):
    """Refuses whatever a graph can't capture, and everything else but room for results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func in (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default), func
        return func(*args, **(kwargs or {}))


class Launches:
    """A kernel that only notes its grids."""

    def __init__(self, launched: Any) -> None:
        self.arg_names = launched.arg_names
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *args, **options: None


@pytest.mark.parametrize("new", [[1] * 5, [1, 1, 20, 3, 1]])
def test_layers_share_a_list_and_nothing_comes_from_the_host(
    new: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per layer attend and merge, of both heights if there are both; grids don't know the contexts."""
    monkeypatch.undo()  # memory is made by torch.empty alone
    modules = {"attend_kernel": kernel, "merge_kernel": step, "list_kernel": step}
    fake = {name: Launches(getattr(module, name)) for name, module in modules.items()}
    for name, launches in fake.items():
        monkeypatch.setattr(modules[name], name, launches)
    cache, _ = filled("int4", (64, 64), [40])
    q = torch.zeros(sum(new), 12, 64)
    options = [AttentionOptions(scale=1.0, window=window) for window in (None, 600)]
    for each in options:  # layers' own arguments are worked out once, for all steps
        step.plan_of(kernel._planned, q, cache.layer(1), each)
    seen = []
    for contexts in ([30, 7, 60, 900, 1], [4000, 4000, 4000, 4000, 4000]):
        batch = batch_of(new, contexts, limit=4096)
        with OnlyEmpty(), monkeypatch.context() as refusing:
            for name in ("tolist", "item", "numpy"):  # which a dispatch mode doesn't see
                refusing.setattr(torch.Tensor, name, None)
            for each in (*options, *options, options[0]):
                kernel.attend(q, cache.layer(1), batch, each)
        seen.append([launches.grids for launches in fake.values()])
        for launches in fake.values():
            launches.grids = []
    assert seen[0] == seen[1]
    heights = len({n > 16 for n in new})
    assert [len(grids) for grids in seen[0]] == [5 * heights, 5 * heights, 2 * heights]


def simulated(keys: Sequence[int], resident: int) -> int:
    """When the last program ends, in keys: each is begun, in order, where one has ended."""
    ends = [0] * (MULTIPROCESSORS * resident)
    for size in keys:
        for _ in range(KV_HEADS):
            heapq.heapreplace(ends, ends[0] + (EMPTY if size < 0 else START + size))
    return max(ends)


def rate(keys: Sequence[int], resident: int) -> float:
    """Of what the multiprocessors would do if they did nothing but keys."""
    done = sum(max(0, size) for size in keys) * KV_HEADS
    return done / (simulated(keys, resident) * MULTIPROCESSORS * resident)


def alike(tokens: int, sequences: int) -> list[int]:
    """As many tokens in sequences of about the same length."""
    return [tokens // sequences + (i < tokens % sequences) for i in range(sequences)]


def split_by_the_longest(contexts: Sequence[int], limit: int) -> list[int]:
    """Keys of each program where the host splits all sequences by one upper limit."""
    wanted = limit * len(contexts) // MULTIPROCESSORS
    each = min(max(1 << max(0, wanted - 1).bit_length(), 256), 8192)
    return [min(n - at, each) if at < n else -1 for at in range(0, limit, each) for n in contexts]


def test_a_graph_for_long_contexts_is_as_fast_as_one_for_short() -> None:
    contexts = [8192] * 64
    long, short = (pieces_of(batch_of([1] * 64, contexts, limit), CUT) for limit in (131_072, 8192))
    for resident in RESIDENT:
        assert simulated(long, resident) <= 1.05 * simulated(short, resident)


def test_mixed_lengths_are_nearly_as_fast_as_equal_ones() -> None:
    mixed, equal = (
        pieces_of(batch_of([1] * 128, contexts, 131_072), CUT) for contexts in (MIXED, alike(sum(MIXED), 128))
    )
    for resident in RESIDENT:
        assert rate(mixed, resident) >= 0.9 * rate(equal, resident)


def test_one_long_sequence_fills_the_machine() -> None:
    pieces = pieces_of(batch_of([1], [131_072]), CUT)
    for resident in RESIDENT:
        assert rate(pieces, resident) >= 0.85


@pytest.mark.parametrize("new", [17, 33, 64])
def test_few_new_tokens_over_a_long_context_fill_it_too(new: int) -> None:
    """With two programs on each multiprocessor: 64 rows take half of its registers."""
    assert rate(pieces_of(batch_of([new], [32_768 + new]), EXTEND), 2) >= 0.85


def test_the_simulation_finds_what_splitting_by_the_longest_costs() -> None:
    contexts = [8192] * 64
    long, short = (split_by_the_longest(contexts, limit) for limit in (131_072, 8192))
    assert max(simulated(long, n) / simulated(short, n) for n in RESIDENT) > 1.05
    mixed, equal = (split_by_the_longest(contexts, 131_072) for contexts in (MIXED, alike(sum(MIXED), 128)))
    assert min(rate(mixed, n) / rate(equal, n) for n in RESIDENT) < 0.9
    one = split_by_the_longest([131_072], 1 << 20)
    assert max(rate(one, n) for n in RESIDENT) < 0.85
