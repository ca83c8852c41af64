"""Quality cost of formats, with intervals: over the entire text, by context depth, and by difficulty."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from kvq.evals.divergence import TokenFigures, TokenPlan, measure_tokens
from kvq.evals.perplexity import PerplexityRow, perplexity_row
from kvq.evals.report.bootstrap import Bootstrap, Floats, Interval, change_text
from kvq.evals.watch import UNWATCHED, Watch
from kvq.formats import KVRecipe
from kvq.models import Model
from kvq.models.check.verdict import verdict

QUARTERS = 4
_SHALLOWEST = 16  # tokens; smaller depths share one bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class _Intervals:
    """Bounds at 95% confidence, each [low, high]; None if there are too few documents."""

    perplexity_change: Interval | None
    kl_mean: Interval | None
    top1_agreement: Interval | None


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityRow(PerplexityRow):
    """Quality cost of one format. Fields are the JSON keys of `kvq eval`."""

    kl_median: float
    kl_p99: float
    top5_agreement: float  # share of the baseline's five most likely tokens among this format's
    documents: int
    verdict: str  # result of `verdict`, then KL and the perplexity change with its interval
    intervals: _Intervals
    # Figures for tokens predicted from `first_depth` to `last_depth` tokens of context
    by_depth: list[dict[str, Any]]
    # Figures for quarters of the documents, sorted by the baseline's mean loss in nats per token; quarter 1
    # is the easiest. Empty if there are fewer than four documents.
    by_difficulty: list[dict[str, Any]]


def measure_quality(
    model: Model,
    kv: str | Sequence[str | KVRecipe],
    text: str,
    plan: TokenPlan,
    bootstrap: Bootstrap | None = None,
    watch: Watch = UNWATCHED,
) -> list[QualityRow]:
    """Measure formats against the baseline, the first unquantized format; every window is a document.

    See `measure_tokens`.
    """
    drawing = bootstrap or Bootstrap()

    def rows(figures: list[TokenFigures]) -> list[QualityRow]:
        return [quality_row(one, figures[0], drawing) for one in figures]

    return rows(measure_tokens(model, kv, text, plan, watch.through(rows)))


def quality_row(figures: TokenFigures, baseline: TokenFigures, bootstrap: Bootstrap) -> QualityRow:
    """Return all figures of one format."""
    median, p99 = np.quantile(figures.kl.astype(np.float64), (0.5, 0.99))
    part = partial(_part, figures, baseline, bootstrap)
    shares, losses = part(slice(None)), _document_means(baseline.nll)
    whole = perplexity_row(figures, baseline)
    documents, kl = len(figures.nll), whole.kl_mean
    change = change_text(whole.perplexity_change, shares["intervals"].perplexity_change, documents)
    told = f"{verdict(kl, whole.perplexity_change)}: KL {kl:.3g}, perplexity {change}"
    return QualityRow(
        **asdict(whole),
        kl_median=float(median),
        kl_p99=float(p99),
        top5_agreement=_mean(figures.top5),
        documents=documents,
        verdict="baseline" if figures is baseline else told,
        intervals=shares["intervals"],
        by_depth=[
            {
                "first_depth": first,
                "last_depth": last,
                "top5_agreement": _mean(figures.top5[:, first - 1 : last]),  # column i: from i + 1 tokens
                **part((slice(None), slice(first - 1, last))),
            }
            for first, last in depths(figures.nll.shape[1])
        ],
        by_difficulty=[
            {
                "quarter": quarter,
                "documents": len(chosen),
                "lowest_loss": float(losses[chosen].min()),
                "highest_loss": float(losses[chosen].max()),
                "perplexity": float(np.exp(_mean(figures.nll[chosen]))),
                **part(chosen),
            }
            for quarter, chosen in enumerate(quarters(losses), start=1)
        ],
    )


def depths(columns: int) -> list[tuple[int, int]]:
    """Return buckets of context depth as (first, last) pairs: 1 to 15 tokens, then powers of two."""
    firsts = [1] + [
        1 << n for n in range(_SHALLOWEST.bit_length() - 1, columns.bit_length()) if 1 << n <= columns
    ]
    return [(first, last - 1) for first, last in zip(firsts, [*firsts[1:], columns + 1], strict=True)]


def quarters(losses: Floats) -> list[Floats]:
    """Return document indices in quarters by the baseline's loss, easiest first. The sort is stable."""
    if len(losses) < QUARTERS:
        return []
    return list(np.array_split(np.argsort(losses, kind="stable"), QUARTERS))


def _part(figures: TokenFigures, baseline: TokenFigures, bootstrap: Bootstrap, part: Any) -> dict[str, Any]:
    """Return the figures for some documents or columns, with the same fields as for all documents."""
    nll, base, kl, top1 = (x[part] for x in (figures.nll, baseline.nll, figures.kl, figures.top1))
    intervals = _Intervals(
        perplexity_change=bootstrap.interval(np.expm1, _document_means(nll) - _document_means(base)),
        kl_mean=bootstrap.interval(lambda mean: mean, _document_means(kl)),
        top1_agreement=bootstrap.interval(lambda mean: mean, _document_means(top1)),
    )
    return {
        "tokens": nll.size,
        "perplexity_change": float(np.expm1(_mean(nll) - _mean(base))),
        "kl_mean": _mean(kl),
        "top1_agreement": _mean(top1),
        "intervals": intervals,
    }


def _mean(values: Any) -> float:
    return float(values.mean(dtype=np.float64))


def _document_means(values: Any) -> Floats:
    means: Floats = values.mean(axis=1, dtype=np.float64)
    return means
