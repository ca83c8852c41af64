"""Verdicts: harm is found, safety takes enough turns, and figures are those of plain counting."""

import itertools
import random
from dataclasses import replace

import pytest

from kvq.evals.report.bootstrap import Bootstrap
from kvq.traces.judging import Turn, advice, judge

BOOTSTRAP = Bootstrap(resamples=400)


def turn(session, number=1, *, depth=100, failed=False, base=False, **more):
    kinds = {"value": (2, 0.5, 1), "text": (6, 0.1, 6)}
    flags = {"is_asked": True, "is_failed": failed, "base_failed": base, "is_changed": failed != base}
    return Turn(session=session, number=number, depth=depth, kinds=kinds, diverges_at=3, **flags, **more)


def row(turns, kv="int4", bits=4.6, tolerance=0.02):
    return judge(kv, bits, turns, BOOTSTRAP, baseline="bf16", tolerance=tolerance)


def test_sums():
    found = row([turn(i, depth=900 * i) for i in range(9)])
    assert (found.tokens, found.sessions, found.turns, found.asked) == (72, 9, 9, 9)
    assert found.kl_mean == pytest.approx(0.6 / 8)
    assert found.kl_decisive == pytest.approx(0.25)
    assert (found.top1_agreement, found.top1_decisive, found.undiverged) == (7 / 8, 1 / 2, 0)
    assert [one["kind"] for one in found.by_kind] == ["value", "text"]
    bounds = [(one["first_depth"], one["last_depth"], one["turns"]) for one in found.by_depth]
    assert bounds == [(0, 1023, 2), (1024, 2047, 1), (2048, 4095, 2), (4096, 8191, 4)]


@pytest.mark.parametrize(("count", "words"), [(4, "too few"), (40, "unclear"), (400, "as safe as bf16")])
def test_no_difference_is_safety_only_over_many_turns(count, words):
    assert words in row([turn(i) for i in range(count)]).verdict


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_harm(share):
    found = row([turn(i, failed=i < share * 200) for i in range(200)])
    assert found.verdict.startswith("harms")
    assert found.more_failed == pytest.approx(share)
    low, high = found.intervals["more_failed"]
    assert low < share < high
    assert found.p_value < 1e-4


def test_lost_and_gained_turns_cancel():
    turns = [turn(i, failed=i % 10 == 0, base=i % 10 == 5) for i in range(200)]
    found = row(turns)
    assert found.more_failed == 0
    assert found.p_value == 1
    assert found.verdict.startswith("unclear")


def test_intervals_hold_what_happened():
    """Of many drawn samples, at least 93% of the intervals hold the share that was drawn from."""
    source, held = random.Random(3), 0
    for _ in range(120):
        sample = [turn(i, failed=source.random() < 0.08, base=source.random() < 0.03) for i in range(80)]
        low, high = row(sample).intervals["more_failed"]
        held += low <= 0.05 <= high
    assert held >= 0.93 * 120


def test_foreseen():
    lost = itertools.cycle(["value", None, None, None])
    found = row([turn(i, base=i < 10, lost=kind) for i, kind in zip(range(100), lost, strict=False)])
    assert found.foreseen == 0.32, "10 of the baseline, and 22 of the others whose values are lost"


def test_changed_calls_of_own_sessions_are_not_called_harm():
    turns = [turn(i, failed=i % 3 == 0, is_right=i % 2 == 0, is_checked=False) for i in range(90)]
    found = row(turns)
    assert found.verdict.startswith("differs: ")
    assert found.as_recorded == 0.5
    scored = [replace(one, is_asked=False) for one in turns]
    assert row(scored).verdict.startswith("not judged")


def test_advice_by_depth():
    base = [turn(i, depth=500 if i < 300 else 5000) for i in range(600)]
    deep = [turn(i, depth=500 if i < 300 else 5000, failed=i > 400) for i in range(600)]
    rows = [row(base, "bf16", 16), row(base, "int8", 8.4), row(deep, "int4", 4.6)]
    assert advice(rows) == (
        "int4 is measured to be as safe as bf16 up to 1,024 tokens; then int8 is measured to be as safe as "
        "bf16 up to 8,192 tokens"
    )
    assert advice([rows[0], row(deep[400:], "int4")]) == "no format was shown to be as safe as bf16"
    few = [row(base[240:], "bf16", 16), row(base[240:], "int8", 8.4)]
    assert advice(few) == (
        "too few turns to tell up to 1,024 tokens; then int8 is measured to be as safe as bf16 up to 8,192 "
        "tokens"
    ), "60 turns leave bf16 itself an interval beyond 2 points"
