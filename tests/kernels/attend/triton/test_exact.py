"""Exact attention in Triton: a token's bits, whatever runs beside it and however it is cut into steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.kernels import AttentionOptions
from kvq.kernels.attend.triton import attend as kernel
from kvq.kernels.attend.triton import step
from kvq.kernels.gpu import shapes
from tests.kernels.attend.triton.test_staged import CONTEXTS, SINKS, Staged
from tests.kernels.kit import poisoned_memory, rows_like_kv

NEW = [[1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [3, 64, 0, 2, 1], [130, 1, 33, 5, 20], [40, 1, 1, 1, 96]]
OPTIONS = [{}, {"window": 41}, {"sinks": SINKS, "softcap": 8.0}, {"chunk": 50}]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 64 keys, merged two at a time; by default, splits that depend on the load."""
    monkeypatch.setattr(step, "_FIXED_PIECE", 64)
    monkeypatch.setattr(step, "_MERGED_TOGETHER", 2)
    monkeypatch.setattr(step, "_MERGED_ROWS", (1, 2))
    monkeypatch.setattr(shapes, "_LEAST_SPLIT", 32)
    poisoned_memory(monkeypatch)


def rows_of(staged: Staged, new: list[int], options: AttentionOptions, *, is_staged: bool) -> list[Tensor]:
    """The outputs of every sequence's new tokens; queries depend on sequence and position alone."""
    dim = staged.kv.sealed.formats.k_head_dim
    queries = [
        rows_like_kv(n, 6, dim, 50 + i)[n - count :]
        for i, (n, count) in enumerate(zip(CONTEXTS, new, strict=True))
    ]
    q, batch = torch.cat(queries), staged.batch(new)
    if is_staged:
        out, _ = kernel.attend_staged(q, staged.kv, batch, options)
    else:
        out, _ = kernel.attend(q, staged.kv.recent, batch.recent, options)
    return list(out.split(new))


@pytest.mark.daily(1)
@pytest.mark.parametrize("more", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("kv", "is_staged"),
    [
        ("bf16+recent=200", False),
        ("int4_per_channel/int4", True),
        ("int8_per_channel/int8+recent=7", True),
        ("int4_mean", True),
        ("int3_mean+sinks=33+recent=8", True),
    ],
)
def test_a_token_has_the_same_bits_beside_any_others(kv: str, is_staged: bool, more: dict[str, Any]) -> None:
    staged, options = Staged(kv, (64, 64), 32), AttentionOptions(scale=0.2, exact=True, **more)
    known: dict[tuple[int, int], Tensor] = {}
    for new in NEW:
        for i, rows in enumerate(rows_of(staged, new, options, is_staged=is_staged)):
            for back in range(len(rows)):
                position = CONTEXTS[i] - 1 - back
                found = known.setdefault((i, position), rows[len(rows) - 1 - back])
                assert torch.equal(found, rows[len(rows) - 1 - back]), (new, i, position)
    assert len(known) > 200


def test_splits_by_the_load_are_found_to_depend_on_it() -> None:
    staged, options = Staged("bf16+recent=200", (64, 64), 32), AttentionOptions(scale=0.2)
    alone, beside = (rows_of(staged, new, options, is_staged=False)[0][-1] for new in (NEW[0], NEW[3]))
    assert not torch.equal(alone, beside)
