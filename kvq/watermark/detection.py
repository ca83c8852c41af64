"""Watermark detection: tests a text's tokens against the key, with a known error rate."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, lgamma, log, log1p, sqrt

import numpy as np
import numpy.typing as npt

from kvq.watermark.key import Key, is_green, layer_bits, token_words
from kvq.watermark.schemes import Green, Scheme, Tournament


@dataclass(frozen=True, kw_only=True, slots=True)
class Detection:
    """Result of a watermark test.

    `tokens`: number of tokens in the text; `counted`: number of tokens that follow a context, counting each
    pair of context and token once. `share`: share of green tokens, or of 1 bits in a tournament's layers;
    `expected`: the share expected without a mark. `z`: standard deviations above `expected`. `p`: probability
    of reaching `share` by chance.
    """

    tokens: int
    counted: int
    share: float
    expected: float
    z: float
    p: float


def detect(tokens: Sequence[int], scheme: Scheme, key: Key) -> Detection:  # D265
    """Test a text for a mark. Only its token ids are needed, not the prompt or the model.

    Over all keys, a text that was not marked with `key` has a p below x with probability x, whatever the text
    is: the n-grams' random words are independent, and no n-gram counts twice.

    Sources: Kirchenbauer et al. 2023, section 3; Dathathri et al. 2024, the mean score. The binomial tail
    replaces their normal approximation, which is inaccurate for small p.
    """
    grams = _distinct(np.asarray(tokens, dtype=np.int64), scheme)
    contexts = [key.word(scheme.tag, context) for context in grams[:, :-1].tolist()]
    words = token_words(np.array(contexts, dtype=np.uint64), grams[:, -1])
    hits = int(
        (is_green(words, scheme) if isinstance(scheme, Green) else layer_bits(words, scheme.layers)).sum()
    )
    trials, expected = _chance(len(words), scheme)
    return Detection(
        tokens=len(tokens),
        counted=len(words),
        share=hits / trials if trials else 0.0,
        expected=expected,
        z=(hits - expected * trials) / sqrt(trials * expected * (1 - expected)) if trials else 0.0,
        p=binomial_tail(hits, trials, expected),
    )


def least_p(counted: int, scheme: Scheme) -> float:
    """Return the p of `counted` tokens if all are fully marked."""
    trials, expected = _chance(counted, scheme)
    return float(expected**trials)


def _chance(counted: int, scheme: Scheme) -> tuple[int, float]:
    """Return the number of bits in `counted` tokens, and the share of 1 bits expected without a mark."""
    return (counted, scheme.gamma) if isinstance(scheme, Green) else (counted * scheme.layers, 0.5)


def _distinct(tokens: npt.NDArray[np.int64], scheme: Scheme) -> npt.NDArray[np.int64]:
    """Return the distinct pairs of context and token, [counted, context + 1], in the text's order.

    In a tournament, only the first token after each context was sampled with the context's bits.
    """
    if len(tokens) <= scheme.context:
        return np.zeros((0, scheme.context + 1), dtype=np.int64)
    grams = np.lib.stride_tricks.sliding_window_view(tokens, scheme.context + 1)
    keyed = grams[:, :-1] if isinstance(scheme, Tournament) else grams
    _, first = np.unique(keyed, axis=0, return_index=True)
    return grams[np.sort(first)]


def binomial_tail(successes: int, trials: int, share: float) -> float:
    """Return P(X >= successes) for a binomial X, with relative error 1e-9. Adds the largest terms first."""
    if successes <= 0:
        return 1.0
    if successes <= trials * share:
        return 1.0 - _upper(trials - successes + 1, trials, 1 - share)  # P(X < s), as a tail of failures
    return _upper(successes, trials, share)


def _upper(successes: int, trials: int, share: float) -> float:
    """Return the upper tail, which must start above the mean, where its terms decrease."""
    if successes > trials:
        return 0.0
    first = (
        lgamma(trials + 1)
        - lgamma(successes + 1)
        - lgamma(trials - successes + 1)
        + successes * log(share)
        + (trials - successes) * log1p(-share)
    )
    k = np.arange(successes, trials, dtype=np.float64)
    ratios = (trials - k) / (k + 1) * (share / (1 - share))
    return exp(first) * (1 + float(np.cumprod(ratios).sum()))
