"""Mean KL divergence of many recipes from unquantized KV, over the path that serves."""

from collections.abc import Callable, Sequence

import torch

from kvq.evals.side_by_side import chunk_size, side_by_side
from kvq.formats import KVRecipe
from kvq.models import Model

_AT_ONCE = 12  # recipes that share a run of the baseline; each has a pool of one window

Progress = Callable[[list[float]], None]  # (divergences of the recipes so far)


def mean_divergences(
    model: Model,
    recipes: Sequence[KVRecipe],
    windows: Sequence[list[int]],
    progress: Progress = lambda found: None,
) -> list[float]:
    """Nats per token, one number per recipe, over all tokens of `windows`.

    The baseline is the weights' own type.

    Raises:
        RequestError: K or V that are not finite.
        ConfigError: a recipe that does not fit the model.
    """
    found: list[float] = []
    for at in range(0, len(recipes), _AT_ONCE):
        found += _together(model, recipes[at : at + _AT_ONCE], windows)
        progress(found)
    return found


def _together(model: Model, recipes: Sequence[KVRecipe], windows: Sequence[list[int]]) -> list[float]:
    context = max(map(len, windows))
    models = [model.with_kv("auto"), *map(model.with_kv, recipes)]
    sessions = [one.session(max_tokens=context) for one in models]
    totals = torch.zeros(len(recipes), dtype=torch.float64)
    for chunk in side_by_side(sessions, windows, chunk_size(model, context)):
        if chunk.session == 0:
            reference, weights = chunk.log_probs, chunk.log_probs.exp()
        else:
            totals[chunk.session - 1] += float((weights * (reference - chunk.log_probs)).sum())
    return (totals / sum(map(len, windows))).tolist()
