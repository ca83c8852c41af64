"""Closeness of a KV format to unquantized KV, at every token of a text."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.real.hidden import BASELINE, Baseline, hidden_states, log_probs, pieces
from kvq.evals.divergence import Reference, TokenFigures
from kvq.evals.exact_tail import exact_keys
from kvq.evals.quality import depths
from kvq.evals.report.bootstrap import Bootstrap
from kvq.evals.side_by_side import Chunk
from kvq.evals.simulated import simulated
from kvq.evals.watch import Progress
from kvq.models import Model
from kvq.models.loading.prepared import PreparedModel

HELD = (1024, 8192)  # tokens of a sequence whose memory is told
_PIECE = 128  # tokens; a document of the bootstrap
METHODS = ("kivi-", "kvarn-")  # that kvq simulates


def in_format(model: Model, kv: str) -> Model:
    """The model over KV of a format, or of a method that kvq simulates.

    Raises:
        ConfigError: an unknown format, or one that doesn't fit.
    """
    if kv.startswith(METHODS):
        return model.with_kv(simulated(kv, model.geometry.head_dims))
    return model.with_kv(kv)


def full_name(model: PreparedModel, kv: str) -> str:
    """Return the full name of a format for a model; short names may change their meaning.

    Raises:
        ConfigError: an unknown format, or one that doesn't fit.
    """
    if kv.startswith(METHODS):
        return kv
    recipe = model.recipe(kv)
    layers = dict.fromkeys(f"{layer.k.name}/{layer.v.name}" for layer in recipe.layers)
    return f"{' '.join(layers)}{recipe.exact}"


def sizes(model: Model) -> dict[str, float]:
    """Bits per element: of sealed blocks, and of all that sequences hold, open and unquantized blocks too."""
    held = {f"bits_held_{tokens}": float(model.bits_held(tokens)) for tokens in HELD}
    return {"bits_per_element": float(model.bits_per_element), **held}


def compare(
    model: Model, baseline: Baseline, windows: Sequence[list[int]], progress: Progress
) -> tuple[TokenFigures, TokenFigures]:
    """Figures of a format and of the baseline over windows of one length."""
    columns = len(windows[0]) - 1
    found, base = (_empty(one, len(windows), columns) for one in (model, baseline.model.with_kv(BASELINE)))
    session = model.session(max_tokens=columns + 1)
    for window, ids in enumerate(windows):
        exact = baseline.states(ids)[:-1]
        began = time.perf_counter()
        hidden = exact if model.recipe.name == BASELINE else hidden_states(session, ids)[:-1]
        seconds = time.perf_counter() - began
        for rows in pieces(model, columns):
            targets = ids[rows.start + 1 : rows.stop + 1]
            sides = log_probs(model, exact[rows]), log_probs(model, hidden[rows])
            reference = Reference.of(sides[0])
            for figures, own in zip((base, found), sides, strict=True):
                figures.take(Chunk(0, window, rows.start, own, 0.0), reference, targets)
        found.seconds += seconds
        progress(window + 1, len(windows))
    return found, base


def row_of(found: TokenFigures, base: TokenFigures) -> dict[str, Any]:
    """Return the figures of a format."""
    keys = exact_keys(found.model.layout, range(found.nll.shape[1]))
    figures = told(nll=found.nll, exact_nll=base.nll, kl=found.kl, top1=found.top1)
    return {**sizes(found.model), **figures, "exact_keys": keys, "forward_s": found.seconds}


def told(*, nll: Any, exact_nll: Any, kl: Any, top1: Any) -> dict[str, Any]:
    """Figures of any cache, from those of every token, [windows, tokens] each.

    `exact_nll`: of the same engine's unquantized KV. Intervals are of pieces of 128 tokens, drawn anew.
    """
    nll, exact_nll, kl, top1 = (np.asarray(one, dtype=np.float64) for one in (nll, exact_nll, kl, top1))
    drawing, change = Bootstrap(), nll - exact_nll
    return {
        "tokens": nll.size,
        "perplexity": float(np.exp(nll.mean())),
        "perplexity_change": float(np.expm1(change.mean())),
        "kl_mean": float(kl.mean()),
        "kl_p999": float(np.quantile(kl, 0.999)),
        "top1_agreement": float(top1.mean()),
        "intervals": {
            "perplexity_change": drawing.interval(np.expm1, _documents(change)),
            "kl_mean": drawing.interval(_same, _documents(kl)),
            "top1_agreement": drawing.interval(_same, _documents(top1)),
        },
        "kl_by_depth": {
            f"{first}-{last}": float(kl[:, first - 1 : last].mean()) for first, last in depths(kl.shape[1])
        },
    }


def answers_agreement(
    model: Model, baseline: Baseline, texts: Sequence[tuple[list[int], list[int]]], progress: Progress
) -> dict[str, Any]:
    """Agreement on the second part of each text, given the first one, at temperature 0."""
    session = model.session(max_tokens=max(len(given) + len(rest) for given, rest in texts))
    same, kl = [], []
    for done, (given, rest) in enumerate(texts, start=1):
        ids, first = [*given, *rest], len(given) - 1
        exact, hidden = baseline.states(ids)[first:-1], hidden_states(session, ids)[first:-1]
        for rows in pieces(model, len(rest)):
            sides = log_probs(model, exact[rows]), log_probs(model, hidden[rows])
            same.append(sides[0].argmax(-1) == sides[1].argmax(-1))
            kl.append((sides[0].exp() * (sides[0] - sides[1])).sum(-1))
        progress(done, len(texts))
    return {
        "canonical_tokens": sum(map(len, same)),
        "canonical_top1_agreement": float(torch.cat(same).double().mean()),
        "canonical_kl_mean": float(torch.cat(kl).double().mean()),
    }


def _documents(values: Any) -> Any:
    """Means of pieces of every window, [windows * pieces]; of nearly one length."""
    parts = np.array_split(values, max(1, round(values.shape[1] / _PIECE)), axis=1)
    return np.concatenate([part.mean(axis=1, dtype=np.float64) for part in parts])


def _same(mean: Any) -> Any:
    return mean


def _empty(model: Model, windows: int, columns: int) -> TokenFigures:
    nll, kl, top1, top5 = np.zeros((4, windows, columns), np.float32)
    return TokenFigures(model=model, nll=nll, kl=kl, top1=top1, top5=top5)
