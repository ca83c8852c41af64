"""What one format costs in quality: over the text, by context depth, by difficulty, with intervals."""

from dataclasses import asdict, dataclass
from typing import Any, Unpack

import numpy as np

from kvq.evals.bootstrap import Bootstrap, Floats, Interval, verdict
from kvq.evals.divergence import Keep, MeasureKeywords, TokenFigures, measure_tokens
from kvq.evals.perplexity import PerplexityRow, perplexity_row
from kvq.formats import KVRecipe
from kvq.models import Model

QUARTERS = 4
_SHALLOWEST = 16  # tokens; what has less context than this is one bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class Intervals:
    """Bounds at 95% confidence, each [low, high]; None where there are too few documents."""

    perplexity_change: Interval | None
    kl_mean: Interval | None
    top1_agreement: Interval | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthRow:
    """Tokens that were predicted from `first_depth` to `last_depth` tokens of context."""

    first_depth: int
    last_depth: int
    tokens: int
    perplexity_change: float
    kl_mean: float
    top1_agreement: float
    top5_agreement: float
    intervals: Intervals


@dataclass(frozen=True, kw_only=True, slots=True)
class DifficultyRow:
    """A quarter of the documents, by the baseline's mean loss on them; 1 is the easiest."""

    quarter: int
    documents: int
    tokens: int
    lowest_loss: float  # nats per token, the baseline's on the easiest document of the quarter
    highest_loss: float
    perplexity: float
    perplexity_change: float
    kl_mean: float
    top1_agreement: float
    intervals: Intervals


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityRow(PerplexityRow):
    """What one format costs. Fields are the JSON keys of `kvq eval`."""

    kl_median: float
    kl_p99: float
    top5_agreement: float  # share of the baseline's five likeliest tokens among this format's five
    documents: int
    verdict: str  # the change of perplexity in words, with its interval
    intervals: Intervals
    by_depth: list[DepthRow]
    by_difficulty: list[DifficultyRow]  # empty for fewer than four documents


def measure_quality(
    model: Model,
    kv: str | list[str | KVRecipe],
    text: str,
    *,
    bootstrap: Bootstrap | None = None,
    keep: Keep = lambda make: None,
    **options: Unpack[MeasureKeywords],
) -> list[QualityRow]:
    """Measure formats against the first unquantized one among them; every window is a document.

    Options are those of `measure_perplexity`. `keep` is told how to make the rows of what
    was measured so far.

    Raises:
        RequestError: text shorter than a window, or a context beyond the model's.
        ConfigError: a format that is unknown, doesn't fit, or lacks its scales.
    """
    drawing = bootstrap or Bootstrap()

    def rows(figures: list[TokenFigures]) -> list[QualityRow]:
        return [quality_row(one, figures[0], drawing) for one in figures]

    return rows(measure_tokens(model, kv, text, keep=lambda make: keep(lambda: rows(make())), **options))


def quality_row(figures: TokenFigures, baseline: TokenFigures, bootstrap: Bootstrap) -> QualityRow:
    """Everything that is said of one format."""
    kl = figures.kl.astype(np.float64).ravel()
    median, p99 = np.quantile(kl, (0.5, 0.99))
    whole = perplexity_row(figures, baseline)
    intervals = _intervals(figures, baseline, bootstrap)
    documents = len(figures.nll)
    words = "baseline" if figures is baseline else ""
    return QualityRow(
        **asdict(whole),
        kl_median=float(median),
        kl_p99=float(p99),
        top5_agreement=_mean(figures.top5),
        documents=documents,
        verdict=words or verdict(whole.perplexity_change, intervals.perplexity_change, documents),
        intervals=intervals,
        by_depth=[_depth_row(figures, baseline, bootstrap, span) for span in depths(figures.nll.shape[1])],
        by_difficulty=[
            _difficulty_row(figures, baseline, bootstrap, number, chosen)
            for number, chosen in enumerate(quarters(_document_means(baseline.nll)), start=1)
        ],
    )


def depths(columns: int) -> list[tuple[int, int]]:
    """Buckets of context depth, first and last: up to 15 tokens, then by powers of two."""
    firsts = [1] + [
        1 << n for n in range(_SHALLOWEST.bit_length() - 1, columns.bit_length()) if 1 << n <= columns
    ]
    return [(first, last - 1) for first, last in zip(firsts, [*firsts[1:], columns + 1], strict=True)]


def quarters(losses: Floats) -> list[Floats]:
    """Documents by the baseline's loss, easiest quarter first: their indices. Ties keep their order."""
    if len(losses) < QUARTERS:
        return []
    return list(np.array_split(np.argsort(losses, kind="stable"), QUARTERS))


def _depth_row(
    figures: TokenFigures, baseline: TokenFigures, bootstrap: Bootstrap, span: tuple[int, int]
) -> DepthRow:
    columns = slice(span[0] - 1, span[1])  # column i was predicted from i + 1 tokens
    part = (slice(None), columns)
    return DepthRow(
        first_depth=span[0],
        last_depth=span[1],
        tokens=figures.nll[part].size,
        perplexity_change=_change(figures, baseline, part),
        kl_mean=_mean(figures.kl[part]),
        top1_agreement=_mean(figures.top1[part]),
        top5_agreement=_mean(figures.top5[part]),
        intervals=_intervals(figures, baseline, bootstrap, part),
    )


def _difficulty_row(
    figures: TokenFigures, baseline: TokenFigures, bootstrap: Bootstrap, quarter: int, chosen: Floats
) -> DifficultyRow:
    losses = _document_means(baseline.nll)[chosen]
    return DifficultyRow(
        quarter=quarter,
        documents=len(chosen),
        tokens=figures.nll[chosen].size,
        lowest_loss=float(losses.min()),
        highest_loss=float(losses.max()),
        perplexity=float(np.exp(_mean(figures.nll[chosen]))),
        perplexity_change=_change(figures, baseline, chosen),
        kl_mean=_mean(figures.kl[chosen]),
        top1_agreement=_mean(figures.top1[chosen]),
        intervals=_intervals(figures, baseline, bootstrap, chosen),
    )


def _intervals(
    figures: TokenFigures, baseline: TokenFigures, bootstrap: Bootstrap, part: Any = slice(None)
) -> Intervals:
    """Of documents as rows, or a part of them or of their columns."""
    nll, base = _document_means(figures.nll[part]), _document_means(baseline.nll[part])
    return Intervals(
        perplexity_change=bootstrap.interval(lambda difference: np.expm1(difference), nll - base),
        kl_mean=bootstrap.interval(lambda mean: mean, _document_means(figures.kl[part])),
        top1_agreement=bootstrap.interval(lambda mean: mean, _document_means(figures.top1[part])),
    )


def _change(figures: TokenFigures, baseline: TokenFigures, part: Any) -> float:
    """Relative change of perplexity over a part of the tokens."""
    return float(np.expm1(_mean(figures.nll[part]) - _mean(baseline.nll[part])))


def _mean(values: Any) -> float:
    return float(values.mean(dtype=np.float64))


def _document_means(values: Any) -> Floats:
    means: Floats = values.mean(axis=1, dtype=np.float64)
    return means
