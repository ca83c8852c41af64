"""Sensitivity of each half of each layer to each format: the KL divergence with only this half quantized.

K is tried in the two narrowest codes of at most 4 bits, since the effect of 2 bits on single attention
patterns is unpredictable; V is tried in the narrowest code. A small divergence is linear in the square of a
code's step, so one more bit quarters it; costs of wider codes and larger groups are estimated from this.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvq.calib.budget import TunePlan
from kvq.calib.candidates import Half, Trial, candidates, recipe_of
from kvq.evals.side_by_side import mean_divergences
from kvq.evals.text import EvalText
from kvq.formats import Code, Grouped, KVFormat, KVRecipe, PerTokenHead
from kvq.models import Model

Progress = Callable[[str, int, int], None]  # (activity, done, total)
Keep = Callable[[Callable[[], list[Trial]]], object]  # called with a function that returns the trials so far

_MOST_TRIED = 4  # bits; wider codes differ from the baseline by little more than rounding
_LEAST_COST = 1e-9  # nats, for formats that differ from the baseline by rounding only


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivities:
    """Cost of every half in every format, and the windows on which it was measured."""

    trials: tuple[Trial, ...]
    rest: KVFormat  # format of halves that are not being tried
    windows: tuple[list[int], ...]  # token ids


def measure_sensitivities(  # D31: layers before the tried half run once
    model: Model, text: EvalText, plan: TunePlan, progress: Progress, keep: Keep
) -> Sensitivities:
    """Measure each half of each layer, and estimate untried formats; windows are spread over the text.

    The first half is quantized in all trials, in INT8 if it isn't being tried. All trials are thus staged if
    keys are quantized by whole blocks, and they differ in one half only. The loss with this INT8 half alone
    (tokens staged in bf16; other kernels' rounding with 16-bit weights) is subtracted. Trials in `plan.known`
    aren't repeated.

    Raises:
        RequestError: the text or the context can't be used, or K or V are not finite.
    """
    windows = plan.windows(model.prepared, text.text, plan.max_windows)
    rest = model.with_kv("auto").recipe.layers[0].k
    found = candidates(model.prepared, plan.codes)
    first = next(iter(found))
    pairs = [(first, candidates(model.prepared, [Code.INT8])[first][0])]  # costs almost nothing
    known = [trial for trial in plan.known if not trial.is_estimated]
    pairs += [(half, fmt) for half, formats in found.items() for fmt in _tried(half, formats, known)]

    def recipe(half: Half, fmt: KVFormat) -> KVRecipe:
        some = {(one.layer, one.part): fmt for one, fmt in (pairs[0], (half, fmt))}
        return replace(recipe_of(model.geometry, some, rest), exact=plan.exact)

    def trials(costs: Sequence[float]) -> list[Trial]:
        done = zip(pairs[1:], costs[1:], strict=False)
        # D30: the loss common to all trials: a half in INT8
        tried = [Trial(half=half, fmt=fmt, kl=max(kl - costs[0], _LEAST_COST)) for (half, fmt), kl in done]
        return [*known, *tried]

    costs = mean_divergences(
        model,
        [recipe(*pair) for pair in pairs],
        plan.weighed(windows),
        firsts=[half.layer for half, _ in pairs[1:]],
        progress=lambda done: progress("trying K and V of every layer", done, len(pairs)),
        keep=lambda costs: keep(trials(costs).copy),
    )
    measured = trials(costs)
    every = [
        _estimate([trial for trial in measured if trial.half == half], fmt)
        for half, formats in found.items()
        for fmt in formats
    ]
    return Sensitivities(trials=tuple(every), rest=rest, windows=tuple(windows))


def _tried(half: Half, formats: Sequence[KVFormat], known: Sequence[Trial]) -> list[KVFormat]:
    """Return the formats of a half to measure: each code's largest, which has the smallest groups."""
    before = [trial.fmt for trial in known if trial.half == half]
    largest = {fmt.code: fmt for fmt in (*formats, *before)}  # the last of each code
    codes = sorted(largest, key=lambda code: code.bits)
    few = codes[:2] if half.part == "k" and codes[:2][-1].bits <= _MOST_TRIED else codes[:1]
    return [largest[code] for code in few if largest[code] not in before]


def _estimate(measured: Sequence[Trial], fmt: KVFormat) -> Trial:  # D29: K is tried in two widths, V in one
    """Return a format's trial, or an estimate based on the widest measured code that is no wider."""
    nearest = max((x for x in measured if x.fmt.code.bits <= fmt.code.bits), key=lambda x: x.fmt.code.bits)
    if nearest.fmt == fmt:
        return nearest
    half = nearest.half
    kl = nearest.kl * _noise(fmt, half) / _noise(nearest.fmt, half)
    return Trial(half=half, fmt=fmt, kl=max(kl, _LEAST_COST), is_estimated=True)


def _noise(fmt: KVFormat, half: Half) -> float:
    """Return the square of a code's step, in a unit common to all formats of a half.

    A step is the range of the values that share a scale, divided by 2^bits. The squared range of n normally
    distributed values grows as log n.
    """
    match fmt.scale:
        case Grouped(group_size=size):
            shared = size
        case PerTokenHead():
            shared = half.head_dim
        case _:
            shared = half.block_size
    return math.log(shared) / 4.0**fmt.code.bits
