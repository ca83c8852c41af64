"""Attention error: the error that a KV format adds to each layer's output for the same inputs.

The model runs with unquantized KV. In every layer, each format stores the same K and V in a separate cache
and attends over this cache with the same Q, so errors do not accumulate across layers. K and V are also
quantized one at a time, to show the source of the error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvq.cache.backend import CacheBackend
from kvq.evals.divergence import TokenPlan, with_baseline
from kvq.evals.side_by_side import one_by_one
from kvq.evals.text import spread
from kvq.evals.watch import UNWATCHED, Watch
from kvq.formats import ExactTokens, KVRecipe
from kvq.models import Model
from kvq.models.check.compared import Found, compare


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRow:
    """Error of one layer's attention output in one format: |a - b| / |b| for each token's output a.

    b is the output with unquantized KV; the norm is over all heads.
    """

    kv: str
    layer: int
    tokens: int
    error_mean: float
    error_max: float
    k_error_mean: float  # with only K quantized; 0 if the format leaves K unquantized
    v_error_mean: float


def measure_attention(
    model: Model, kv: Sequence[str | KVRecipe], text: str, plan: TokenPlan, watch: Watch = UNWATCHED
) -> list[AttentionRow]:
    """Measure every format except the baseline in every layer, on windows spread over a text.

    The baseline is the first unquantized format, or the weights' dtype if there is none. Only `context` and
    `max_windows` of the plan are used; by default, all windows of the text are measured.

    Raises:
        RequestError: the text is shorter than a window, the context exceeds the model's, or K or V are not
            finite.
        ConfigError: a format is unknown, doesn't fit the model, or lacks its scales.
    """
    baseline, *models = with_baseline(model, kv)
    windows = replace(plan, max_windows=None).windows(model.prepared, text)
    windows = spread(windows, plan.max_windows or len(windows))
    others: dict[str, CacheBackend] = {}  # int8 and k8v4 share a K
    for one in models:
        for recipe in (one.recipe, *_halves(one.recipe, baseline.recipe)):
            if recipe.digest() not in others:
                others[recipe.digest()] = baseline.with_kv(recipe).session(max_tokens=plan.context).cache
    session = baseline.session(max_tokens=plan.context)
    found = compare(session, others)
    for done in one_by_one(session, windows):
        watch.progress(done, len(windows))
    return [row for one in models for row in _rows(one.recipe, baseline.recipe, found)]


def _halves(recipe: KVRecipe, baseline: KVRecipe) -> tuple[KVRecipe, KVRecipe]:
    """Return `recipe` with only K and with only V quantized; both stay staged if `recipe` is staged."""

    def half(of_k: bool) -> KVRecipe:
        layers = tuple(
            replace(layer, v=plain.v, v_clip=1.0) if of_k else replace(layer, k=plain.k, k_clip=1.0)
            for layer, plain in zip(recipe.layers, baseline.layers, strict=True)
        )
        centers = recipe.centers and recipe.centers.some([(of_k, not of_k)] * len(layers))
        found = replace(recipe, layers=layers, centers=centers)
        was_open = recipe.is_staged and not found.is_staged
        return replace(found, exact=ExactTokens(recent=1)) if was_open else found

    return half(True), half(False)


def _rows(recipe: KVRecipe, baseline: KVRecipe, found: Found) -> list[AttentionRow]:
    digests = [one.digest() for one in (recipe, *_halves(recipe, baseline))]
    return [
        AttentionRow(
            kv=recipe.name,
            layer=layer,
            tokens=whole.tokens,
            error_mean=whole.mean,
            error_max=whole.largest,
            k_error_mean=k_only.mean,
            v_error_mean=v_only.mean,
        )
        for layer in sorted(layer for digest, layer in found if digest == digests[0])
        for whole, k_only, v_only in [[found[digest, layer] for digest in digests]]
    ]
