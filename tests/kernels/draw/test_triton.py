"""Promise: the kernels draw the reference's token, from any logits, in as many launches for any rows."""

import random
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from kvq.kernels.draw import reference, triton
from tests.kernels.draw.kit import LAST, Row, drawn, interpreted_masses, poison

_INF = float("inf")


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reference, "masses", interpreted_masses)
    poison(monkeypatch)
    with warnings.catch_warnings():  # NumPy reports what overflows on purpose
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def check(logits: Tensor, rows: list[Row]) -> None:
    tokens, finite = drawn(logits, rows)
    assert all(finite)
    wanted = [row.token(x) for row, x in zip(rows, logits.float(), strict=True)]
    assert tokens == wanted, [row for row, a, b in zip(rows, tokens, wanted, strict=True) if a != b]


def random_row(pick: random.Random) -> Row:
    return Row(
        temperature=pick.choice([0.0, 0.1, 0.7, 1.0, 3.0, 50.0]),
        min_p=pick.choice([0.0, 0.0, 0.05]),
        top_k=pick.choice([None, 1, 5, 50, 2000, 10**9]),
        top_p=pick.choice([1.0, 0.9, 0.3, 1e-9]),
        uniform=pick.random(),
    )


def adversarial(vocab: int) -> dict[str, Tensor]:
    """Logits that a search may fail on."""
    noise = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
    one = torch.full((vocab,), -_INF)
    one[vocab // 3] = 1.0
    far = noise * 1e-4
    far[-1] = 20.0
    return {
        "all equal": torch.full((vocab,), 1.25),
        "one left": one,
        "most masked": noise.masked_fill(noise < min(1.3, float(noise.max())), -_INF),
        "many ties": (noise * 2).round(),
        "ties of bf16": (noise * 3).bfloat16().float(),
        "all but one in a bin": far,
        "one far below": noise.index_fill(0, torch.tensor([0]), -1e9),
        "two zeros": torch.where(noise > 0, 0.0, -0.0),
        "the ends of fp32": torch.where(noise > 0, 3.4e38, -3.4e38),
        "below fp32's normal numbers": noise * 1e-40,
    }


_ROWS = [
    Row(top_p=0.9, uniform=0.37),
    Row(top_k=5, uniform=LAST),
    Row(temperature=1e6, top_k=20, top_p=0.6, min_p=0.05, uniform=0.8),
    Row(temperature=3.0, top_k=77, top_p=0.97, uniform=LAST),  # ends among ties, with others before
    Row(temperature=2.0**-126, top_p=0.5, uniform=LAST),
    Row(min_p=0.1, uniform=0.0),
    Row(temperature=1e6, top_p=1 - 1e-16, uniform=LAST),
]


@pytest.mark.parametrize("vocab", [1, 7, 1000, 4099])
def test_random_rows_draw_the_references_tokens(vocab: int) -> None:
    pick = random.Random(vocab)
    rows = [random_row(pick) for _ in range(8)]
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    check(logits, rows)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("vocab", [33, 9001, 50257])
def test_many_random_rows_draw_the_references_tokens(vocab: int, seed: int) -> None:
    pick = random.Random(seed)
    rows = [random_row(pick) for _ in range(12)]
    logits = torch.randn(12, vocab, generator=torch.Generator().manual_seed(seed)) * pick.choice([0.1, 3, 9])
    check(logits, rows)


def test_ties_and_ends_draw_the_references_tokens() -> None:
    """One row for each kind of logits; the long run takes them all."""
    logits = adversarial(300)
    check(torch.stack([*logits.values()]), [_ROWS[i % len(_ROWS)] for i in range(len(logits))])


@pytest.mark.long
@pytest.mark.parametrize("name", list(adversarial(1)))
@pytest.mark.parametrize("vocab", [2, 300, 4500])
def test_every_row_over_ties_and_ends(vocab: int, name: str) -> None:
    logits = adversarial(vocab)[name].expand(len(_ROWS), -1)
    check(logits, _ROWS)


def test_more_candidates_than_there_is_room_for() -> None:
    """4,500 equal logits share a bin; the row is searched where it lies."""
    check(torch.ones(2, 4500), [Row(top_p=0.9, uniform=0.37), Row(top_k=4400, uniform=LAST)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_in_rows_apart(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 520, generator=torch.Generator().manual_seed(3)).to(dtype)[:, :500]
    check(logits, [Row(temperature=0.0), Row(top_p=0.95, uniform=0.9), Row(uniform=0.9)])


def test_bad_rows_are_flagged_and_their_neighbours_untouched() -> None:
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(4))
    logits[0, 17], logits[2, 99], logits[4], logits[6, 3] = torch.nan, _INF, -_INF, -torch.nan
    rows = [Row(top_p=0.8), Row(top_k=9, top_p=0.8), Row(), Row(temperature=0.0)] * 2
    tokens, finite = drawn(logits, rows)
    assert finite == [False, True, False, True, False, True, False, True]
    assert all(0 <= token < 100 for token in tokens), "others read their logits"
    for i in (1, 3, 5, 7):
        assert tokens[i] == rows[i].token(logits[i])


def test_a_change_hides_nothing() -> None:
    """The logits before changes are looked at too, in greedy rows and others."""
    raw = torch.zeros(4, 33)
    raw[0, 5], raw[1, 32], raw[2, 0] = torch.nan, _INF, -_INF
    changed = torch.full((4, 33), -_INF)
    changed[:3, 7] = 1.0
    for row in (Row(temperature=0.0), Row(top_k=3)):
        tokens, finite = drawn(changed, [row] * 4, raw)
        assert (finite, tokens[2]) == ([False, False, True, False], 7)


@pytest.mark.parametrize(
    ("rows", "vocab", "launches"),
    [
        ([Row(temperature=0.0)], 5, 2),
        ([Row(), Row(temperature=0.0)], 9000, 3),
        ([Row(top_p=0.5), Row(), Row(temperature=0.0), Row(top_k=3)] * 2, 9000, 7),
    ],
)
def test_launches_do_not_grow(
    rows: list[Row], vocab: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda self, *_, grid, **__: launched.append((self.fn.__name__, grid))
    )
    most = max(row.kind(vocab) for row in rows)
    lines = torch.stack([torch.from_numpy(row.line(vocab)) for row in rows])
    triton.draw(torch.zeros(len(rows), vocab), lines if most else None, most)
    assert len(launched) == launches
