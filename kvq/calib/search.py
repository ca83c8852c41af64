"""Finding the recipe that costs least quality within a memory budget, and proving it.

What each half of each layer costs in each format is found alone (`kvq.calib.sensitivity`). Small divergences
add up well, so a knapsack finds the best recipe for every budget at once; recipes are then measured whole, on
text that the search did not see, beside the uniform formats.

Source: per-layer pairs of formats from Li et al. 2025, KVTuner; the search here is exact instead.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import product
from math import ceil

import numpy as np

from kvq.calib.allocate import Allocation
from kvq.calib.budget import TunePlan, recipe_bytes
from kvq.calib.candidates import Trial, halves, recipe_of
from kvq.calib.sensitivity import Keep, Progress, Sensitivities, measure_sensitivities
from kvq.errors import ConfigError
from kvq.evals.divergence import TokenPlan, measure_tokens
from kvq.evals.perplexity import PerplexityRow, instrument_facts, look, perplexity_row
from kvq.evals.report.bootstrap import Bootstrap, Interval
from kvq.evals.side_by_side import mean_divergences
from kvq.evals.text import EvalText
from kvq.evals.watch import Watch
from kvq.formats import KVFormat, KVRecipe
from kvq.models import Model

_TRIES = 8  # to meet a limit of divergence, which costs add up to only nearly
_RIVALS = 2  # uniform pairs of formats that are measured beside the short names


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """A recipe or format with its cost on text that the search did not see."""

    kind: str  # "uniform", "tuned" or "chosen"
    row: PerplexityRow
    window_kl: tuple[float, ...]  # of every window
    expected_kl: float | None = None  # by the search, of tuned recipes

    def ratio(self, other: "_Point") -> Interval | None:
        """Return the 95% interval of the ratio of divergences, by resampling windows; None for too few."""
        return Bootstrap().interval(np.divide, self.window_kl, other.window_kl)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """Result of `tune`."""

    recipe: KVRecipe
    budget_bytes: int  # per token
    expected_kl: float  # nats per token, by adding up
    search_kl: float  # of the whole recipe, on other windows of the search's text
    points: tuple[_Point, ...]  # the baseline first, the chosen recipe last
    sensitivities: Sensitivities
    cautions: tuple[str, ...] = ()  # why figures of this model on the text say nothing

    @property
    def chosen(self) -> PerplexityRow:
        """Figures of the chosen recipe on text that the search did not see."""
        return self.points[-1].row

    @property
    def rival(self) -> _Point | None:
        """Best uniform format of at most the chosen recipe's bytes."""
        most = self.chosen.kv_bytes_per_token
        fitting = [x for x in self.points[1:-1] if x.kind == "uniform" and x.row.kv_bytes_per_token <= most]
        return min(fitting, key=lambda x: x.row.kl_mean, default=None)

    def front(self) -> list[_Point]:
        """Return the points that no other beats in both bytes and divergence, smallest first."""
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
    """Search on `text`, verify on `held_out`. `keep` gets a function that returns the trials so far.

    The recipe is the best that was found on `text`: a uniform format that fits the budget and
    is better there wins.

    Raises:
        ConfigError: no choice of formats meets the plan.
        RequestError: a text or context that can't be used.
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
    verifying = TokenPlan(context=window, max_windows=plan.verify_windows)
    watch = Watch(lambda done, total: progress("verifying whole recipes", done, total))
    cost = search.allocation.cost
    verified: list[tuple[str, KVRecipe, float | None]] = [  # with what is expected of it
        *(("uniform", other, None) for other in (model.prepared.recipe("auto"), *uniform)),
        *(("tuned", other, cost(search.nbytes(other))) for other in others),
        ("chosen", replace(recipe, label="chosen"), cost(budget) if is_tuned else None),
    ]
    figures = measure_tokens(model, [one for _, one, _ in verified], held_out.text, verifying, watch)
    points = tuple(
        _Point(
            kind=kind,
            row=perplexity_row(own, figures[0]),
            window_kl=tuple(own.kl.mean(axis=1, dtype=np.float64).tolist()),
            expected_kl=kl,
        )
        for (kind, _, kl), own in zip(verified, figures, strict=True)
    )
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


class _Search:
    """Best recipe for every budget, from sensitivities, and the uniform formats to compare with."""

    def __init__(self, model: Model, found: Sensitivities, plan: TunePlan) -> None:
        self._model, self._found, self._plan = model, found, plan
        self._units = halves(model.geometry, model.prepared.block_size)
        self.allocation = Allocation([[x for x in found.trials if x.half == half] for half in self._units])
        self._named = [model.prepared.recipe(f"{code.name}{plan.exact}") for code in plan.codes]

    def nbytes(self, recipe: KVRecipe) -> Fraction:
        return recipe_bytes(self._model.geometry, recipe, self._model.prepared.block_size)

    def recipe(self, budget: Fraction | int, label: str) -> KVRecipe:
        """Return the recipe of least expected cost within `budget` bytes per token."""
        return self._recipe(self.allocation.choose(budget), label)

    def _recipe(self, chosen: list[Trial], label: str) -> KVRecipe:
        formats = {(trial.half.layer, trial.half.part): trial.fmt for trial in chosen}
        recipe = recipe_of(self._model.geometry, formats, self._found.rest, label)
        return replace(recipe, exact=self._plan.exact)

    def budget_for(self, max_kl: float) -> int:
        """Return few bytes per token at which the recipe, measured on the search's text, meets `max_kl`.

        Expected and measured divergence are nearly proportional: a few tries narrow it down from both sides.
        """
        target, tried = max_kl, dict[int, float]()
        for _ in range(_TRIES):
            budget = ceil(self.allocation.budget_for(target))
            if budget in tried:
                break
            tried[budget] = mean_divergences(
                self._model, [self.recipe(budget, "tried")], self._found.windows
            )[0]
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
        """Return the recipe of least divergence within a budget, its divergence, and if it is the search's.

        `windows`: others than costs were measured on, where there are any; those would favour the search's.
        """
        recipes = [self.recipe(budget, "tuned"), *self._pairs(budget)]
        costs = mean_divergences(
            self._model, recipes, windows, progress=lambda done: progress(done, len(recipes))
        )
        best = min(range(len(recipes)), key=costs.__getitem__)
        recipe = replace(recipes[best], label="", model_digest=self._model.weights.digest)
        return recipe, costs[best], best == 0

    def uniform(self, budget: int) -> list[KVRecipe]:
        """List the uniform formats to compare with: short names near a budget, the best pairs within it."""
        named = self._near(budget)
        known = [recipe.layers for recipe in named]
        return [*named, *(pair for pair in self._pairs(budget) if pair.layers not in known)]

    def _near(self, budget: int) -> list[KVRecipe]:
        """List short names within a budget and the next larger one; each takes as long as the recipe."""
        named = sorted(self._named, key=self.nbytes)
        return named[: sum(self.nbytes(recipe) <= budget for recipe in named) + 1]

    def _pairs(self, budget: int) -> list[KVRecipe]:
        """Return uniform recipes of least expected cost within a budget, one format for K and one for V."""
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
        """Make tuned recipes at the bytes of the short names near a budget, for the front."""
        sizes = {self.nbytes(recipe): recipe.name for recipe in self._near(budget)}
        return [
            self.recipe(size, f"tuned, as {name}")
            for size, name in sorted(sizes.items())
            if size != budget and self.allocation.least_bytes <= size < self.allocation.most_bytes
        ]
