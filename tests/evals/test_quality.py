"""Figures by depth and difficulty, against plain loops over tokens."""

from dataclasses import asdict

import numpy as np
import pytest

from kvq.evals import default_text
from kvq.evals.divergence import TokenPlan, measure_tokens
from kvq.evals.quality import depths, quality_row, quarters
from kvq.evals.report.bootstrap import Bootstrap

TEXT = default_text().text


@pytest.fixture(scope="module")
def figures(tiny):
    return measure_tokens(tiny, ["fp32", "int4"], TEXT, TokenPlan(context=40, max_windows=34))


@pytest.fixture(scope="module")
def row(figures):
    return quality_row(figures[1], figures[0], Bootstrap(resamples=200))


def test_quantiles_and_top5_are_those_of_all_tokens(figures, row):
    kl = sorted(float(x) for x in figures[1].kl.ravel())
    assert row.kl_median == pytest.approx((kl[len(kl) // 2 - 1] + kl[len(kl) // 2]) / 2, rel=1e-6)
    assert row.kl_median < row.kl_mean < row.kl_p99 < row.kl_p999 <= kl[-1]
    assert row.top5_agreement == pytest.approx(np.mean([float(x) for x in figures[1].top5.ravel()]))
    assert (row.documents, row.tokens) == (34, 34 * 39)


def test_depth_buckets_are_powers_of_two_and_hold_every_token_once(figures, row):
    assert depths(39) == [(1, 15), (16, 31), (32, 39)]
    assert depths(1023)[-1] == (512, 1023)
    assert depths(1) == [(1, 1)]
    assert sum(depth["tokens"] for depth in row.by_depth) == row.tokens
    second = row.by_depth[1]
    kl, nll, base = [], [], []
    for window in range(34):
        for position in range(39):
            if 16 <= position + 1 <= 31:  # tokens before the predicted one
                kl.append(float(figures[1].kl[window, position]))
                nll.append(float(figures[1].nll[window, position]))
                base.append(float(figures[0].nll[window, position]))
    assert second["kl_mean"] == pytest.approx(np.mean(kl))
    assert second["perplexity_change"] == pytest.approx(np.exp(np.mean(nll)) / np.exp(np.mean(base)) - 1)


def test_quarters_are_by_the_baselines_loss_and_hold_every_document_once(figures, row):
    assert [part["documents"] for part in row.by_difficulty] == [9, 9, 8, 8]
    assert sum(part["tokens"] for part in row.by_difficulty) == row.tokens
    losses = sorted((float(loss), i) for i, loss in enumerate(figures[0].nll.mean(1, dtype=float)))
    hardest = [i for _, i in losses[-8:]]
    last = row.by_difficulty[-1]
    assert last["kl_mean"] == pytest.approx(np.mean([figures[1].kl[i].mean() for i in hardest]), rel=1e-5)
    assert (last["lowest_loss"], last["highest_loss"]) == pytest.approx((losses[-8][0], losses[-1][0]))
    bounds = [(part["lowest_loss"], part["highest_loss"]) for part in row.by_difficulty]
    assert bounds == sorted(bounds)
    assert quarters(np.arange(3.0)) == []


def test_intervals_hold_their_figure_and_a_quarter_of_eight_documents_has_one(row):
    whole = asdict(row)
    for name in ("perplexity_change", "kl_mean", "top1_agreement"):
        for one in (whole, *whole["by_depth"], *whole["by_difficulty"]):
            low, high = one["intervals"][name]
            assert low <= one[name] <= high, name


def test_the_baseline_is_named_as_such(figures):
    base = quality_row(figures[0], figures[0], Bootstrap(resamples=100))
    assert (base.verdict, base.kl_p999, base.top5_agreement) == ("baseline", 0, 1)
    assert base.intervals.perplexity_change == (0, 0)
