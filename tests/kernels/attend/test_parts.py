"""attend over a part of the keys, by their age, against the reference; and all parts merged."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.attend import reference
from kvq.kernels.attend.options import Part
from kvq.kernels.merge_partials.reference import merge_partials
from tests.kernels.attend.test_attend import Case, relative_error
from tests.kernels.backends import every_backend

attend: Any = None  # the implementation under test
NOWHERE = (1 << 31) - 1


backend = every_backend("attend", globals())


def case_of(kv: str, block_size: int) -> Case:
    """Prefill, chunk over context, decodes before and behind the first old key, and one that adds nothing."""
    return Case(
        kv,
        query_lens=[41, 9, 1, 0, 1, 1],
        context_lens=[41, 60, 77, 12, 9, 64],
        num_blocks=270 // block_size + 8,
        block_size=block_size,
    )


def parts(recent: int, block_size: int, sinks: int) -> list[Part]:
    """All keys before a query, as a staged layer shares them out."""
    same = {"recent": recent, "block_size": block_size}
    whole = Part(is_young=False, first=sinks, **same), Part(is_young=True, **same)
    return [*whole, *([Part(is_young=False, last=sinks, **same)] if sinks else [])]


def without_unseen(batch: SequenceBatch, part: Part, block_size: int, window: int | None) -> SequenceBatch:
    """The batch with nonsense in its tables where no query looks."""
    asked = AttentionOptions(scale=1.0, window=window, part=part)
    tables = batch.tables.clone()
    for table, new, context in zip(tables, batch.query_lens, batch.context_lens, strict=True):
        oldest, end = asked.oldest(context - new), asked.end(context - 1) if new else 0
        table[: oldest // block_size] = NOWHERE
        table[max(0, -(-end // block_size)) :] = NOWHERE
    return replace(batch, tables=tables)


def found(case: Case, options: AttentionOptions, *, is_captured: bool) -> tuple[Tensor, Tensor]:
    """What the implementation finds, with nothing to see in unseen blocks."""
    assert options.part is not None
    batch = without_unseen(case.batch, options.part, case.block_size, options.window)
    if is_captured:
        limits = (4096,) * len(batch.context_lens)
        batch = replace(batch, lens=case.batch.device_lens(), context_lens=limits, is_captured=True)
    return attend(case.q, case.cache.layer(1), batch, options)


def check_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], kv: str, backend: str) -> None:
    """To rounding in fp32, or of queries and weights to integers: see `test_attend.check_against`.

    Where nothing is seen, both are (0, -inf).
    """
    rounded = backend.startswith("cpu") and kv != "bf16"
    out, lse = (5e-4, 5e-4) if rounded else (1e-4, 1e-5)
    assert relative_error(got[0], want[0]) < out
    torch.testing.assert_close(got[1], want[1], rtol=lse, atol=lse)


@pytest.mark.daily(27)
@pytest.mark.parametrize("more", [{}, {"window": 23}, {"window": 45, "softcap": 8.0}], ids=str)
@pytest.mark.parametrize(("recent", "sinks"), [(0, 0), (7, 10), (16, 0), (30, 20), (90, 5)])
@pytest.mark.parametrize("kv", ["int4", "bf16"])
def test_every_part_is_what_the_reference_sees_and_all_are_the_whole(
    kv: str, recent: int, sinks: int, more: dict[str, Any], backend: str
) -> None:
    case = case_of(kv, 5)
    asked = AttentionOptions(scale=0.2, **more)
    layer, outs, lses = case.cache.layer(1), [], []
    for part in parts(recent, 5, sinks):
        options = asked.of_part(part)
        want = reference.attend(case.q, layer, case.batch, options)
        out, lse = found(case, options, is_captured=backend == "triton")
        assert out.isfinite().all()
        check_same((out, lse), want, kv, backend)
        outs.append(out)
        lses.append(lse)
    whole = merge_partials(torch.stack(outs), torch.stack(lses))
    check_same(whole, reference.attend(case.q, layer, case.batch, asked), kv, backend)


@pytest.mark.daily(8)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("kv", ["int4", "k8v4", "int2"])
def test_tiles_that_lie_in_one_block_see_the_same(kv: str, block_size: int, backend: str) -> None:
    case = case_of(kv, block_size)
    for part in parts(20, block_size, block_size):
        options = AttentionOptions(scale=0.2, part=part, sinks=torch.linspace(-1, 1, 6))
        want = reference.attend(case.q, case.cache.layer(1), case.batch, options)
        got = found(case, options, is_captured=backend == "triton")
        check_same(got, want, kv, backend)
