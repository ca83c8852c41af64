"""Verdicts on a format from its measurements, and reasons why some models and texts prove nothing.

Perplexity alone is not enough: a format that changes every distribution may lower it by luck. If a model only
guesses, or ignores the cache's contents, its perplexity stays the same whatever the format.
Whether a model can show damage at all is measured by `instrument_check` in `kvq.evals.perplexity`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

HARMLESS_KL, HARMLESS_CHANGE = 0.02, 0.02  # nats per token; relative change of perplexity: below both
BROKEN_KL, BROKEN_CHANGE = 0.1, 0.1  # above one of them
_BLIND = "this model can't show damage on this text"

Verdict = Literal["harmless", "warning", "broken"]


def verdict(kl_mean: float, perplexity_change: float) -> Verdict:  # D46: verdicts go by divergence
    """Judge a format by its mean divergence from unquantized KV, in nats, and relative perplexity change.

    A lower perplexity counts as unchanged. NaN counts as broken.
    """
    if kl_mean < HARMLESS_KL and perplexity_change < HARMLESS_CHANGE:
        return "harmless"
    return "warning" if kl_mean <= BROKEN_KL and perplexity_change <= BROKEN_CHANGE else "broken"


def chance_perplexity(tokens: npt.NDArray[np.int64], vocab_size: int) -> float:
    """Return the perplexity of predicting each token from its frequency so far.

    If a uniform guess over the vocabulary is better, return its perplexity. `tokens`: token ids of a text.

    Source: Witten and Bell, "The Zero-Frequency Problem" (1991), method C for unseen tokens.
    """
    order, places = np.argsort(tokens, kind="stable"), np.arange(len(tokens))
    is_first = np.diff(tokens[order], prepend=-1) != 0  # first occurrence of its token, in sorted order
    before = np.empty_like(places)
    before[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    kinds = np.cumsum(before == 0) - (before == 0)  # distinct tokens seen before
    unseen = np.maximum(kinds, 1) / np.maximum(vocab_size - kinds, 1)
    losses = np.log(np.maximum(places + kinds, 1)) - np.log(np.where(before, before, unseen))
    return min(math.exp(losses.mean()), float(vocab_size))


def cautions(
    perplexity: float,
    chance: float,
    look: Sequence[Mapping[str, Any]] = (),
    instrument: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """Yield one sentence for each reason why a model's figures on a text say nothing about formats.

    `perplexity`: measured with unquantized KV. `chance`: perplexity of guessing from token counts. `look`,
    `instrument`: fields of the results.
    """
    if perplexity >= chance:
        yield (
            f"{_BLIND}: its perplexity of {perplexity:,.4g} is no better than chance ({chance:,.4g} by "
            f"counting tokens), so small changes say nothing of a format; give a trained model, with its own "
            f"tokenizer, and text of a kind that it knows"
        )
    for seen in look:
        kl, change, cut = seen["kl_mean"], seen["perplexity_change"], seen["attention_window"]
        what = seen["kv"] if seen["instrument"] == "int2" else f"attention cut to {cut} tokens"
        if verdict(kl, change) == "harmless":
            yield (
                f"{_BLIND}: {what} looks harmless over its first {seen['tokens']} tokens (mean KL "
                f"{kl:.2g}, perplexity {change:+.1%}), so that formats do says nothing"
            )
    if instrument is not None and not instrument["passed"]:
        yield describe_check(instrument)


def describe_check(check: Mapping[str, Any]) -> str:
    """Return the result of the instrument check in words."""
    can, advice = ("can", "") if check["passed"] else ("can NOT", "; do not trust small differences")
    return (
        f"instrument: this model on this text {can} show damage: "
        f"perplexity {check['window_change']:+.1%} with a {check['window_tokens']}-token window, "
        f"{check['int2_change']:+.1%} with {check['int2_format']} "
        f"(both must reach {check['limit']:+.0%}){advice}"
    )
