"""Perplexity, KL divergence and top-1 agreement of KV formats, on the path that serves requests."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from kvq.errors import ConfigError, RequestError
from kvq.evals.divergence import INSTRUMENT_WINDOW, TokenFigures, TokenPlan, measure_tokens
from kvq.evals.exact_tail import exact_keys
from kvq.evals.watch import UNWATCHED, Watch
from kvq.formats import KVRecipe
from kvq.models import Model
from kvq.models.check.verdict import cautions

INSTRUMENT_LIMIT = 0.05  # smallest relative loss that a sensitive instrument shows
_LOOK_TOKENS = 256  # enough for the mean divergence to show whether damage is detectable
_LOOK_TEXT = 64 * _LOOK_TOKENS  # number of characters that contain these tokens; the text may be long
_LARGEST_LOSS = 700.0  # nats per token; exp of more overflows


@dataclass(frozen=True, kw_only=True, slots=True)
class PerplexityRow:
    """Quality and size of one format. Fields are the JSON keys of `kvq perplexity`."""

    kv: str
    bits_per_element: float  # scales included
    bits_held: float  # for a sequence of `context` tokens, including partly filled blocks
    kv_bytes_per_token: float
    compression: float  # bf16 bytes / these bytes
    tokens: int  # predicted
    perplexity: float
    perplexity_change: float  # relative to the baseline: 0.01 is 1% worse
    chance_perplexity: float  # of guessing by frequency; a model must do better to be meaningful
    kl_mean: float  # nats per token, divergence of this format from the baseline
    kl_p999: float
    top1_agreement: float  # share of tokens with the baseline's most likely token
    exact_keys: float  # share of unquantized keys among those seen, with a quantized format
    seconds: float
    attention_window: int | None = None  # tokens, if attention was limited on purpose
    instrument: str = ""  # "window" or "int2" in rows that check the instrument


def measure_perplexity(
    model: Model, kv: str | Sequence[str | KVRecipe], text: str, plan: TokenPlan, watch: Watch = UNWATCHED
) -> list[PerplexityRow]:
    """Measure formats against the baseline, the first unquantized format; see `measure_tokens`."""
    return _rows(measure_tokens(model, kv, text, plan, watch.through(_rows)))


def _rows(figures: list[TokenFigures]) -> list[PerplexityRow]:
    return [perplexity_row(one, figures[0]) for one in figures]


def perplexity_row(figures: TokenFigures, baseline: TokenFigures) -> PerplexityRow:
    """Return one format's figures over the entire text.

    Raises:
        RequestError: the loss is too large to be expressed as a perplexity.
    """
    kl, context = figures.kl.astype(np.float64).ravel(), figures.nll.shape[1] + 1
    perplexity = _perplexity(figures)
    return PerplexityRow(
        kv=figures.model.recipe.name,
        **size_figures(figures.model, context),
        tokens=figures.nll.size,
        perplexity=perplexity,
        perplexity_change=perplexity / _perplexity(baseline) - 1,
        chance_perplexity=baseline.chance,
        kl_mean=float(kl.mean()),
        kl_p999=float(np.quantile(kl, 0.999)),
        top1_agreement=float(figures.top1.mean(dtype=np.float64)),
        exact_keys=exact_keys(figures.model.layout, range(context - 1), figures.window_limit),
        seconds=figures.seconds,
        attention_window=figures.window_limit,
        instrument=figures.role,
    )


def size_figures(model: Model, context: int) -> dict[str, float]:
    """Return the sizes of a format, keyed as in `PerplexityRow`; `bits_held` is for `context` tokens."""
    nbytes = model.kv_bytes_per_token
    return {
        "bits_per_element": model.bits_per_element,
        "bits_held": model.bits_held(context),
        "kv_bytes_per_token": nbytes,
        "compression": 2 * model.geometry.elements_per_token / nbytes,
    }


def instrument_check(rows: Sequence[PerplexityRow]) -> dict[str, Any]:
    """Check whether damage is detectable with the model and text of these rows; see `measure_tokens`.

    Returns JSON: the relative changes with a short window and with 2-bit KV, the limit, and `passed`.
    """
    window = next(r for r in rows if r.instrument == "window")
    int2 = next(r for r in rows if r.instrument == "int2")
    changes = (window.perplexity_change, int2.perplexity_change)
    return {
        "window_tokens": INSTRUMENT_WINDOW,
        "window_change": changes[0],
        "int2_format": int2.kv,
        "int2_change": changes[1],
        "limit": INSTRUMENT_LIMIT,
        "passed": min(changes) >= INSTRUMENT_LIMIT,
    }


def look(model: Model, baseline: str | KVRecipe, text: str, plan: TokenPlan) -> list[dict[str, Any]]:
    """Return the two rows of the instrument check on the first 256 tokens of a text, as JSON.

    The list is empty if the plan includes the check or the check is impossible. With short windows, it
    contains only the row for 2-bit KV.
    """
    short = replace(plan, context=min(plan.context, _LOOK_TOKENS), max_windows=1, instrument=True)
    try:
        rows = [] if plan.instrument else measure_perplexity(model, [baseline], text[:_LOOK_TEXT], short)
    except (ConfigError, RequestError):  # no 2-bit KV for this model, or losses too large
        return []
    is_long = min(short.context, plan.attention_window or short.context) >= _LOOK_TOKENS
    return [asdict(r) for r in rows if r.instrument == "int2" or (r.instrument == "window" and is_long)]


def instrument_facts(rows: Sequence[PerplexityRow], seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON that describes a result's instrument: `cautions`, and the check they are based on.

    `rows`: all measured rows, the baseline first. `seen`: the rows from `look`.
    """
    has_check = any(row.instrument == "window" for row in rows)
    check = {"instrument": instrument_check(rows)} if has_check else {"look": seen}
    return {"cautions": list(cautions(rows[0].perplexity, rows[0].chance_perplexity, **check)), **check}


def _perplexity(figures: TokenFigures) -> float:
    """Return the exponential of the mean negative log-likelihood."""
    mean = float(figures.nll.mean(dtype=np.float64))
    if not mean < _LARGEST_LOSS:  # NaN too
        raise RequestError(
            f"{figures.model.recipe.name}: the loss is {mean:.3g} nats a token, which no perplexity can "
            f"express; the weights or the dtype overflow, or the tokenizer is another model's"
        )
    return math.exp(mean)
