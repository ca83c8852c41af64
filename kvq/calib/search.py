"""Search for the recipe with the least quality loss within a memory budget, and its validation.

The cost of each half of each layer in each format is measured separately (`kvq.calib.sensitivity`). Small
divergences are nearly additive, so a knapsack finds the best recipe for every budget at once. Whole recipes
are then measured, together with uniform formats, on text that the search did not use.

Source: per-layer pairs of formats from Li et al. 2025, KVTuner; the search here is exact instead.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import product
from math import ceil

import numpy as np
from numpy.typing import NDArray

from kvq.calib.budget import TunePlan, recipe_bytes
from kvq.calib.candidates import Trial, halves, recipe_of
from kvq.calib.sensitivity import Keep, Progress, Sensitivities, measure_sensitivities
from kvq.errors import ConfigError
from kvq.evals.divergence import TokenPlan, measure_tokens
from kvq.evals.perplexity import PerplexityRow, instrument_facts, look, perplexity_row
from kvq.evals.report.bootstrap import Bootstrap, Interval
from kvq.evals.side_by_side import mean_divergences
from kvq.evals.text import EvalText, spread
from kvq.evals.watch import Watch
from kvq.formats import KVFormat, KVRecipe
from kvq.models import Model


class _Allocation:  # D27: exact knapsack over single costs
    """Optimal choices of one option per unit, for every budget."""

    def __init__(self, units: Sequence[Sequence[Trial]]) -> None:
        """Solve for all budgets, in O(units x options x bytes / their greatest common divisor).

        There must be at least one unit, each with at least one option.
        """
        self._units = units
        least = [min(option.nbytes for option in options) for options in units]
        above = [[o.nbytes - fewest for o in options] for options, fewest in zip(units, least, strict=True)]
        self.least_bytes = sum(least)  # per token, with the smallest choices
        self._unit_bytes = _common_divisor(list(itertools.chain(*above)))
        self._shifts = [[int(nbytes / self._unit_bytes) for nbytes in one] for one in above]
        best = np.zeros(1)
        self._picked: list[NDArray[np.int16]] = []  # per unit: the option chosen for each budget
        for options, shifts in zip(units, self._shifts, strict=True):
            grown = np.full(len(best) + max(shifts), np.inf)
            picked = np.zeros(len(grown), dtype=np.int16)
            for index, (option, shift) in enumerate(zip(options, shifts, strict=True)):
                total, part = best + option.kl, slice(shift, shift + len(best))
                better = total < grown[part]
                grown[part][better] = total[better]
                picked[part][better] = index
            best = grown
            self._picked.append(picked)
        self._costs = best  # [extra bytes / unit_bytes], for exactly that many bytes
        self.most_bytes = self.least_bytes + (len(best) - 1) * self._unit_bytes  # with the largest

    def cost(self, budget: Fraction | int) -> float:
        """Return the minimum total cost within `budget` bytes per token."""
        return float(self._costs[self._best(budget)])

    def choose(self, budget: Fraction | int) -> list[Trial]:
        """Return one option per unit, with the minimum total cost within `budget` bytes per token.

        Raises:
            ConfigError: even the smallest choices don't fit.
        """
        at = self._best(budget)
        chosen: list[Trial] = []
        for options, shifts, picked in reversed(
            list(zip(self._units, self._shifts, self._picked, strict=True))
        ):
            chosen.append(options[picked[at]])
            at -= shifts[picked[at]]
        return chosen[::-1]

    def budget_for(self, cost: float) -> Fraction:
        """Return the smallest budget in bytes per token for which the minimum total cost is at most `cost`.

        Raises:
            ConfigError: every choice costs more than `cost`.
        """
        enough = np.flatnonzero(self._costs <= cost)
        if not len(enough):
            raise ConfigError(
                f"no choice of formats is expected to cost {cost:g} or less; "
                f"the best costs {self._costs.min():.3g}"
            )
        return self.least_bytes + int(enough[0]) * self._unit_bytes

    def _best(self, budget: Fraction | int) -> int:
        extra = (budget - self.least_bytes) // self._unit_bytes
        if extra < 0:
            raise ConfigError(
                f"the smallest formats allowed take {float(self.least_bytes):g} bytes per token, "
                f"the budget is {float(budget):g}"
            )
        return int(np.argmin(self._costs[: extra + 1]))


def _common_divisor(sizes: Sequence[Fraction | int]) -> Fraction:
    """Return the largest number of which all sizes are multiples, or 1 if all sizes are zero."""
    whole = math.lcm(*(size.denominator for size in sizes))
    return Fraction(math.gcd(*(int(size * whole) for size in sizes)) or whole, whole)


_TRIES = 8  # to meet a divergence limit, as the sum of costs is only approximate
_RIVALS = 2  # uniform pairs of formats to measure in addition to the short names


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """A recipe or uniform format with its measured cost on text that the search did not use."""

    kind: str  # "uniform", "tuned" or "chosen"
    row: PerplexityRow
    window_kl: tuple[float, ...]  # for every window
    expected_kl: float | None = None  # the search's estimate, for tuned recipes
    decisive_kl: float | None = None  # where unseen sessions decide something

    def ratio(self, other: "_Point") -> Interval | None:
        """Return the 95% bootstrap interval of the ratio of divergences, or None if windows are too few."""
        return Bootstrap().interval(np.divide, self.window_kl, other.window_kl)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """Result of `tune`."""

    recipe: KVRecipe
    budget_bytes: int  # per token
    expected_kl: float  # nats per token, the sum of the halves' costs
    search_kl: float  # of the whole recipe, on other windows of the search's text
    points: tuple[_Point, ...]  # the baseline first, the chosen recipe last
    sensitivities: Sensitivities
    cautions: tuple[str, ...] = ()  # why figures of this model on this text prove nothing

    @property
    def chosen(self) -> PerplexityRow:
        """Measurements of the chosen recipe on text that the search did not use."""
        return self.points[-1].row

    @property
    def rival(self) -> _Point | None:
        """Best uniform format that needs no more bytes than the chosen recipe, or None."""
        most = self.chosen.kv_bytes_per_token
        fitting = [x for x in self.points[1:-1] if x.kind == "uniform" and x.row.kv_bytes_per_token <= most]
        return min(fitting, key=lambda x: x.row.kl_mean, default=None)

    def front(self) -> list[_Point]:
        """Return the points that no other point beats in both bytes and divergence, sorted by bytes."""
        best, kept = float("inf"), []
        for point in sorted(self.points, key=lambda p: (p.row.kv_bytes_per_token, p.row.kl_mean)):
            if point.row.kl_mean < best:
                best = point.row.kl_mean
                kept.append(point)
        return kept


def tune(
    model: Model,
    text: EvalText,
    held_out: EvalText,
    plan: TunePlan,
    *,
    progress: Progress = lambda what, done, total: None,
    keep: Keep = lambda make: None,
) -> Tuned:
    """Search on `text` and verify on `held_out`; `keep` is passed a function that returns the trials so far.

    The chosen recipe is the best one found on `text`, which may be a uniform format within the budget.

    Raises:
        ConfigError: no choice of formats meets the plan.
        RequestError: a text or the context can't be used.
    """
    window = plan.check(model.prepared, text, held_out)
    found = measure_sensitivities(model, text, plan, progress, keep)
    search = _Search(model, found, plan)
    budget = plan.budget_bytes
    if budget is None:
        assert plan.max_kl is not None, "one of both is given"
        budget = search.budget_for(plan.max_kl)
    windows = plan.windows(model.prepared, text.text, 2 * plan.max_windows)
    unseen = [ids for ids in windows if ids not in found.windows]
    choosing = partial(progress, "comparing the recipe with pairs of formats")
    recipe, search_kl, is_tuned = search.best(budget, unseen or windows, choosing)
    uniform, others = search.uniform(budget), search.others(budget)
    cost = search.allocation.cost
    verified: list[tuple[str, KVRecipe, float | None]] = [  # kind, recipe, expected divergence
        *(("uniform", other, None) for other in (model.prepared.recipe("auto"), *uniform)),
        *(("tuned", other, cost(search.nbytes(other))) for other in others),
        ("chosen", replace(recipe, label="chosen"), cost(budget) if is_tuned else None),
    ]
    verifying = TokenPlan(context=window, max_windows=plan.verify_windows)
    points = _verify(model, verified, (held_out, verifying, plan), progress)
    rows = [point.row for point in points]
    return Tuned(
        recipe=recipe,
        budget_bytes=budget,
        expected_kl=cost(budget),
        search_kl=search_kl,
        points=points,
        sensitivities=found,
        cautions=tuple(instrument_facts(rows, look(model, "auto", held_out.text, verifying))["cautions"]),
    )


def _verify(
    model: Model,
    verified: Sequence[tuple[str, KVRecipe, float | None]],
    given: tuple[EvalText, TokenPlan, TunePlan],
    progress: Progress,
) -> tuple[_Point, ...]:
    """Measure recipes on a text, and where other sessions decide if the plan has some."""
    held_out, verifying, plan = given
    recipes = [one for _, one, _ in verified]
    watch = Watch(lambda done, total: progress("verifying whole recipes", done, total))
    figures = measure_tokens(model, recipes, held_out.text, verifying, watch)
    decisive: Sequence[float | None] = [None] * len(recipes)
    if plan.unseen:
        windows = spread(plan.unseen, plan.verify_windows)
        what = "measuring where other sessions decide"
        decisive = mean_divergences(
            model, recipes, windows, progress=lambda done: progress(what, done, len(recipes))
        )
    return tuple(
        _Point(
            kind=kind,
            row=perplexity_row(own, figures[0]),
            window_kl=tuple(own.kl.mean(axis=1, dtype=np.float64).tolist()),
            expected_kl=kl,
            decisive_kl=decided,
        )
        for (kind, _, kl), own, decided in zip(verified, figures, decisive, strict=True)
    )


class _Search:
    """Search, based on sensitivities, for a budget's best recipe and for uniform formats to compare."""

    def __init__(self, model: Model, found: Sensitivities, plan: TunePlan) -> None:
        self._model, self._found, self._plan = model, found, plan
        self._units = halves(model.geometry, model.prepared.block_size)
        self.allocation = _Allocation([[x for x in found.trials if x.half == half] for half in self._units])
        self._named = [model.prepared.recipe(f"{code.name}{plan.exact}") for code in plan.codes]

    def nbytes(self, recipe: KVRecipe) -> Fraction:
        return recipe_bytes(self._model.geometry, recipe, self._model.prepared.block_size)

    def recipe(self, budget: Fraction | int, label: str) -> KVRecipe:
        """Return the recipe with the minimum expected cost within `budget` bytes per token."""
        return self._recipe(self.allocation.choose(budget), label)

    def _recipe(self, chosen: list[Trial], label: str) -> KVRecipe:
        formats = {(trial.half.layer, trial.half.part): trial.fmt for trial in chosen}
        recipe = recipe_of(self._model.geometry, formats, self._found.rest, label)
        return replace(recipe, exact=self._plan.exact)

    def budget_for(self, max_kl: float) -> int:
        """Return a small budget, in bytes per token, that meets `max_kl` on the search's text.

        As expected and measured divergence are nearly proportional, a few tries from both sides suffice.
        """
        target, tried = max_kl, dict[int, float]()
        for _ in range(_TRIES):
            budget = ceil(self.allocation.budget_for(target))
            if budget in tried:
                break
            windows = self._plan.weighed(self._found.windows)
            tried[budget] = mean_divergences(self._model, [self.recipe(budget, "tried")], windows)[0]
            target *= 0.98 * max_kl / tried[budget]
        enough = [budget for budget, kl in tried.items() if kl <= max_kl]
        if not enough:
            raise ConfigError(
                f"no recipe with a KL divergence of {max_kl:g} or less was found; the best had "
                f"{min(tried.values()):.3g}"
            )
        return min(enough)

    def best(
        self, budget: int, windows: list[list[int]], progress: Callable[[int, int], None]
    ) -> tuple[KVRecipe, float, bool]:
        """Return the best recipe within a budget, its divergence, and whether the search produced it.

        `windows`: if possible, not those on which costs were measured, which would favour the search's
        recipe.
        """
        recipes = [self.recipe(budget, "tuned"), *self._pairs(budget)]
        costs = mean_divergences(
            self._model,
            recipes,
            self._plan.weighed(windows),
            progress=lambda done: progress(done, len(recipes)),
        )
        best = min(range(len(recipes)), key=costs.__getitem__)
        recipe = replace(recipes[best], label="", model_digest=self._model.weights.digest)
        return recipe, costs[best], best == 0

    def uniform(self, budget: int) -> list[KVRecipe]:
        """Return uniform formats to compare: the short names near a budget, and the best pairs within it."""
        named = self._near(budget)
        known = [recipe.layers for recipe in named]
        return [*named, *(pair for pair in self._pairs(budget) if pair.layers not in known)]

    def _near(self, budget: int) -> list[KVRecipe]:
        """Return short names up to a budget and the next larger; measuring one takes the recipe's time."""
        named = sorted(self._named, key=self.nbytes)
        return named[: sum(self.nbytes(recipe) <= budget for recipe in named) + 1]

    def _pairs(self, budget: int) -> list[KVRecipe]:
        """Return the best uniform recipes within a budget, with one format for K and one for V."""
        of_part: dict[str, dict[KVFormat, list[Trial]]] = {"k": {}, "v": {}}
        for trial in self._found.trials:
            of_part[trial.half.part].setdefault(trial.fmt, []).append(trial)
        pairs = [
            [*k, *v]
            for k, v in product(of_part["k"].values(), of_part["v"].values())
            if len(k) + len(v) == len(self._units) and sum(x.nbytes for x in (*k, *v)) <= budget
        ]
        pairs.sort(key=lambda pair: sum(trial.kl for trial in pair))
        exact = self._plan.exact
        return [self._recipe(x, f"{x[0].fmt.name}/{x[-1].fmt.name}{exact}") for x in pairs[:_RIVALS]]

    def others(self, budget: int) -> list[KVRecipe]:
        """Return tuned recipes for the front, each with as many bytes as a short name near the budget."""
        sizes = {self.nbytes(recipe): recipe.name for recipe in self._near(budget)}
        return [
            self.recipe(size, f"tuned, as {name}")
            for size, name in sorted(sizes.items())
            if size != budget and self.allocation.least_bytes <= size < self.allocation.most_bytes
        ]
