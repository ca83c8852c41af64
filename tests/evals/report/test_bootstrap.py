"""Intervals cover what they claim to cover."""

import numpy as np
import pytest

from kvq.errors import ConfigError
from kvq.evals.report.bootstrap import Bootstrap, _t_quantile, change_text, expanded_tail, share_interval


def plain_interval(values, resamples, seed):
    """A percentile bootstrap of the mean, one resample after another."""
    random = np.random.default_rng(seed)
    n = len(values)
    means = [np.mean([values[i] for i in random.integers(0, n, n)]) for _ in range(resamples)]
    tail = expanded_tail(n)
    return np.quantile(means, tail), np.quantile(means, 1 - tail)


def test_the_vectorized_bootstrap_is_that_of_a_plain_loop():
    values = np.random.default_rng(3).gamma(2.0, 1.0, 40)
    got = Bootstrap(resamples=20_000).interval(lambda mean: mean, values)
    assert got == pytest.approx(plain_interval(values, 20_000, seed=8), rel=0.01)


@pytest.mark.parametrize("documents", [8, 20, 100])
def test_intervals_cover_the_truth_about_as_often_as_they_say(documents):
    random = np.random.default_rng(1)
    trials, hits = 400, 0
    for trial in range(trials):
        values = random.normal(0.3, 1.0, documents)
        low, high = Bootstrap(resamples=400, seed=trial).interval(lambda mean: mean, values)
        hits += low <= 0.3 <= high
    assert 0.92 <= hits / trials <= 0.98


def test_pairing_tells_a_difference_far_smaller_than_the_spread():
    random = np.random.default_rng(2)
    base = random.normal(3.0, 1.0, 50)
    worse = base + 0.001 + random.normal(0, 0.001, 50)
    low, high = Bootstrap().interval(np.expm1, worse - base)
    assert 0 < low < 0.001 < high < 0.002
    both = Bootstrap().interval(lambda a, b: np.expm1(a - b), worse, base)
    assert both == pytest.approx((low, high), rel=1e-9)


def test_a_seed_repeats_itself_and_memory_is_bounded(monkeypatch):
    values = np.arange(30.0)
    once, again, other = (Bootstrap(seed=s).interval(lambda m: m, values) for s in (1, 1, 2))
    assert once == again != other
    monkeypatch.setattr("kvq.evals.report.bootstrap._DRAWN", 3000)  # in twenty pieces
    assert Bootstrap(seed=1).interval(lambda m: m, values) == pytest.approx(once, rel=0.05)


def test_too_few_documents_have_no_interval_and_say_so():
    assert Bootstrap().interval(lambda mean: mean, np.arange(7.0)) is None
    assert share_interval(3, 7) is None
    assert change_text(0.01, None, 3) == "+1.00%; 3 documents are too few for an interval"
    with pytest.raises(ConfigError, match="at least 100 resamples, got 99"):
        Bootstrap(resamples=99)


@pytest.mark.parametrize(("freedom", "table"), [(7, 2.3646), (9, 2.2622), (29, 2.0452), (1000, 1.9623)])
def test_students_t_is_that_of_the_tables(freedom, table):
    assert _t_quantile(0.975, freedom) == pytest.approx(table, abs=0.001)


def test_a_share_of_all_or_nothing_still_has_an_error_bar():
    low, high = share_interval(32, 32)
    assert (round(low, 3), high) == (0.893, 1.0)
    assert share_interval(0, 32) == pytest.approx((0.0, 1 - low))
    assert share_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, method 3


@pytest.mark.parametrize(
    ("change", "interval", "words"),
    [
        (0.0, (-0.0002, 0.0003), "-0.020% .. +0.030% (95%)"),
        (0.011, (0.009, 0.013), "+0.90% .. +1.30% (95%)"),
        (-0.02, (-0.03, -0.01), "-3.00% .. -1.00% (95%)"),
        (0.00001, (0.000004, 0.000012), "+0.0004% .. +0.0012% (95%)"),
    ],
)
def test_changes_carry_their_error_bar(change, interval, words):
    assert change_text(change, interval, 40) == words
