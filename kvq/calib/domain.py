"""Domain check of a calibration: scales from one kind of text may clip values from another kind."""

from dataclasses import replace
from typing import Any

import numpy as np

from kvq.calib.observe import Observations, observe
from kvq.evals.divergence import TokenPlan, measure_tokens
from kvq.evals.perplexity import instrument_facts, look, perplexity_row
from kvq.evals.report.bootstrap import Bootstrap
from kvq.evals.text import EvalText, begin_ids, text_ids, token_windows
from kvq.evals.watch import UNWATCHED, Progress
from kvq.formats import KVRecipe
from kvq.models import Model
from kvq.models.loading.prepared import PreparedModel

_WINDOWS = 32  # of the checked text
_LARGER = 1.05  # a maximum counts as exceeded above this ratio
_WORSE = 1.25  # times the divergence of a recipe calibrated on the checked text itself


def verdict_of(check: dict[str, Any]) -> str:
    """Return the verdict of `check_domain` as a sentence, preceded by any cautions."""
    cause = "see above" if check["cautions"] else "too few windows to tell"
    words = {True: "is fit", False: "is NOT fit", None: f"may or may not be fit ({cause})"}[check["is_fit"]]
    span = ""
    if check["kl_difference"] is not None:
        low, high = check["kl_difference"]
        span = f", a difference of {low:+.6f} to {high:+.6f} at 95%"
    return "".join(f"caution: {line}\n" for line in check["cautions"]) + (
        f"{check['kv']} calibrated on {check['calibrated_on']} {words} for {check['checked_on']}: "
        f"{check['heads_exceeded']} of {check['heads']} heads go beyond their maximum (most: "
        f"{check['largest_excess']:.2f}x, {check['worst_head']}); mean KL {check['kl_mean']:.6f}, calibrated "
        f"on that text itself {check['own_kl_mean']:.6f}{span}; perplexity {check['perplexity_change']:+.2%} "
        f"and {check['own_perplexity_change']:+.2%}, over {check['tokens']:,} tokens"
    )


def check_domain(  # D35: judged by divergence, compared with the checked text's own scales
    model: Model,
    recipe: KVRecipe,
    seen: Observations,
    text: EvalText,
    *,
    context: int | None = None,
    progress: Progress = UNWATCHED.progress,
) -> dict[str, Any]:
    """Compare a calibrated recipe, on another text, with the same formats calibrated on that text.

    Returns the JSON of `kvq calibrate --check`.

    The recipe is unfit if its divergence from unquantized KV is more than 25% larger and the difference is
    significant.

    Raises:
        RequestError: the text is shorter than one window.
    """
    window = min(context or 1024, model.prepared.max_context)
    head = _beginning(model, text, window)
    own = observe(model, head, context=window, max_windows=_WINDOWS, progress=progress)
    itself = replace(recipe, static_scales=own.scales(), label="itself")
    if recipe.centers is not None:
        centered = ((bool(layer.k), bool(layer.v)) for layer in recipe.centers.layers)
        itself = replace(itself, centers=own.centers().some(centered))
    recipes: list[str | KVRecipe] = ["auto", replace(recipe, label="given"), itself]
    plan = TokenPlan(context=window, max_windows=_WINDOWS)
    baseline, given, other = measure_tokens(model, recipes, head.text, plan)
    seen_first = look(model, "auto", head.text, plan)
    cautions = instrument_facts([perplexity_row(baseline, baseline)], seen_first)["cautions"]
    excess = _excess(seen, own)
    difference = Bootstrap().interval(
        lambda mine, its: mine - its, given.kl.mean(axis=1), other.kl.mean(axis=1)
    )
    kl, own_kl = float(given.kl.mean()), float(other.kl.mean())
    is_worse = difference is not None and difference[0] > 0 and kl > _WORSE * own_kl
    return {
        "calibrated_on": seen.text.name,
        "checked_on": text.name,
        "kv": recipe.name,
        "heads": len(excess),  # of K and of V, over all layers
        # Heads whose maximum on the checked text exceeds the calibrated one by over 5%; then the worst head
        "heads_exceeded": sum(ratio > _LARGER for ratio, _ in excess),
        "largest_excess": max(excess)[0],
        "worst_head": max(excess)[1],
        "tokens": given.nll.size,  # predicted tokens
        "kl_mean": kl,  # relative to unquantized KV
        "own_kl_mean": own_kl,  # for the same formats, calibrated on the checked text itself
        "kl_difference": difference,  # 95% interval from resampling windows in pairs; None if they are few
        "perplexity_change": float(np.expm1((given.nll - baseline.nll).mean(dtype=np.float64))),
        "own_perplexity_change": float(np.expm1((other.nll - baseline.nll).mean(dtype=np.float64))),
        "is_fit": None if difference is None or cautions else not is_worse,  # None: unknown
        "cautions": cautions,  # why figures of this model on this text prove nothing
    }


def check_length(model: PreparedModel, text: EvalText, context: int | None) -> None:
    """Raise RequestError if a text is shorter than one window; called before any long work."""
    token_windows(model.tokenizer, text.text, context=min(context or 1024, model.max_context))


def _beginning(model: Model, text: EvalText, window: int) -> EvalText:
    """Return the text of the measured windows, so that the same tokens are observed and measured."""
    tokens = len(text_ids(model.tokenizer, text.text)) + len(begin_ids(model.tokenizer))
    share = min(1.0, (_WINDOWS + 0.5) * window / tokens)
    return replace(text, text=text.text[: int(share * len(text.text))])


def _excess(seen: Observations, own: Observations) -> list[tuple[float, str]]:
    """Return, per head, the ratio of the text's own maximum to the calibrated one, and the head's name."""
    return [
        (found / allowed, f"{part.upper()} of layer {index}, head {head}")
        for index, (mine, given) in enumerate(zip(own.scales().layers, seen.scales().layers, strict=True))
        for part in ("k", "v")
        for head, (found, allowed) in enumerate(zip(getattr(mine, part), getattr(given, part), strict=True))
    ]
