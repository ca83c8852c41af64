"""Finding the recipe that costs least quality within a memory budget, and proving it.

What each half of each layer costs in each format is measured alone (`kvq.calib.sensitivity`). Small
divergences add up well, so a knapsack finds the best recipe for every budget at once; recipes are then
measured whole, on text that the search did not see, beside the uniform formats.

Source: per-layer pairs of formats from Li et al. 2025, KVTuner; the search here is exact instead.
"""

import itertools
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from kvq.calib.allocate import Allocation
from kvq.calib.budget import TunePlan, bytes_of_bits, recipe_bytes
from kvq.calib.candidates import grouped_formats, halves, recipe_of, staged_alike
from kvq.calib.observe import spread_windows
from kvq.calib.sensitivity import Keep, Progress, Sensitivities, measure_sensitivities
from kvq.errors import ConfigError, UnfitFormat
from kvq.evals.divergence import TokenPlan, Watch
from kvq.evals.perplexity import PerplexityRow, instrument_facts, look, measure_perplexity
from kvq.evals.side_by_side import mean_divergences
from kvq.evals.text import EvalText
from kvq.formats import Code, KVRecipe
from kvq.models import Model

_TRIES = 8  # to meet a limit of divergence, which costs add up to only nearly


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A recipe or format, and what it cost on text that the search did not see."""

    kind: str  # "uniform", "tuned" or "chosen"
    row: PerplexityRow
    expected_kl: float | None = None  # by the search, of tuned recipes


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """What `tune` found."""

    recipe: KVRecipe
    budget_bytes: int  # per token
    expected_kl: float  # nats per token, by adding up
    search_kl: float  # of the whole recipe, on other windows of the search's text
    points: tuple[Point, ...]  # the baseline first, then by bytes
    sensitivities: Sensitivities
    cautions: tuple[str, ...] = ()  # why figures of this model on the text say nothing

    @property
    def chosen(self) -> PerplexityRow:
        """The chosen recipe on text that the search did not see."""
        return next(point.row for point in self.points if point.kind == "chosen")

    def front(self) -> list[Point]:
        """The points that nothing else beats in both bytes and divergence, smallest first."""
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
    """Search on `text`, verify on `held_out`. `keep` is told now and then how to make the trials so far.

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
    windows = spread_windows(model.prepared, text.text, context=window, max_windows=2 * plan.max_windows)
    unseen = [ids for ids in windows if ids not in found.windows]
    recipe, search_kl, is_tuned = search.best(budget, unseen or windows)
    uniform, others = search.uniform, search.others(budget)
    verifying = TokenPlan(context=window, max_windows=plan.verify_windows)
    watch = Watch(lambda done, total: progress("verifying whole recipes", done, total))
    recipes = [model.prepared.recipe("auto"), *uniform.values(), *others, replace(recipe, label="chosen")]
    rows = measure_perplexity(model, recipes, held_out.text, verifying, watch)
    cost = search.allocation.cost
    kinds = ["uniform"] * (1 + len(uniform)) + ["tuned"] * len(others) + ["chosen"]
    expected = [None] * (1 + len(uniform)) + [cost(search.nbytes(other)) for other in others]
    expected.append(cost(budget) if is_tuned else None)
    points = zip(kinds, rows, expected, strict=True)
    return Tuned(
        recipe=recipe,
        budget_bytes=budget,
        expected_kl=cost(budget),
        search_kl=search_kl,
        points=tuple(Point(kind=kind, row=row, expected_kl=kl) for kind, row, kl in points),
        sensitivities=found,
        cautions=tuple(instrument_facts(rows, look(model, "auto", held_out.text, verifying))["cautions"]),
    )


class _Search:
    """The best recipe for every budget, from sensitivities, beside the uniform formats."""

    def __init__(self, model: Model, found: Sensitivities, plan: TunePlan) -> None:
        self._model, self._found, self._plan = model, found, plan
        units = halves(model.geometry, model.prepared.block_size)
        self.allocation = Allocation([found.of(half) for half in units])
        self.uniform = uniform_recipes(model.geometry.head_dims, plan)

    def nbytes(self, recipe: KVRecipe) -> Fraction:
        """Per token."""
        return recipe_bytes(self._model.geometry, recipe, self._model.prepared.block_size)

    def recipe(self, budget: Fraction | int, label: str) -> KVRecipe:
        """The recipe of least expected cost within `budget` bytes per token."""
        chosen = self.allocation.choose(budget)
        stored = {(trial.half.layer, trial.half.part): trial.stored for trial in chosen}
        recipe = recipe_of(self._model.geometry, stored, self._found.rest, self._found.centers, label)
        return staged_alike(recipe, self._plan.exact) if self._plan.is_staged else recipe

    def budget_for(self, max_kl: float) -> int:
        """Few bytes per token at which the whole recipe, measured on the search's text, meets `max_kl`.

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

    def best(self, budget: int, windows: list[list[int]]) -> tuple[KVRecipe, float, bool]:
        """The recipe of least divergence within a budget, its divergence, and whether it is the search's.

        `windows`: others than costs were measured on, where there are any; those would favour the search's.
        """
        rivals = [recipe for recipe in self.uniform.values() if self.nbytes(recipe) <= budget]
        recipes = [self.recipe(budget, "tuned"), *rivals]
        costs = mean_divergences(self._model, recipes, windows)
        best = min(range(len(recipes)), key=costs.__getitem__)
        recipe = replace(recipes[best], label="", model_digest=self._model.weights.digest)
        return recipe, costs[best], best == 0

    def others(self, budget: int) -> list[KVRecipe]:
        """Tuned recipes at the bytes of the uniform formats with short names, and between, for the front."""
        named = _recipes(self._model.geometry.head_dims, _short_names(self._plan))
        sizes = sorted({self.nbytes(recipe) for recipe in named.values()})
        between = [(low + high) / 2 for low, high in itertools.pairwise(sizes)]
        one_bit = bytes_of_bits(self._model.geometry, 1.0)
        found = {
            self.nbytes(recipe): recipe
            for size in sorted({*sizes, *between} - {budget})
            if self.allocation.least_bytes <= size < self.allocation.most_bytes
            for recipe in [self.recipe(size, "")]
        }
        return [replace(one, label=f"tuned, {float(size / one_bit):.3g} bits") for size, one in found.items()]


def uniform_recipes(head_dims: list[tuple[int, int]], plan: TunePlan) -> dict[str, KVRecipe]:
    """The uniform formats to compare with, in a staged search less their block means, too.

    Of every code all groups, rotated, and the smallest not rotated, too.
    """
    names = _short_names(plan)
    smallest = min(map(min, head_dims))
    for code in plan.codes:
        if code.is_grouped:
            rotated, plain = (grouped_formats(smallest, code, rotated=rotated) for rotated in (True, False))
            formats = [*rotated, plain[-1]]
            if plan.is_staged:
                formats += [replace(fmt, mean=True) for fmt in rotated]
            names += [f"{fmt.name}{plan.exact}" for fmt in formats]
    recipes = _recipes(head_dims, names)
    longest = {(x.layers, x.exact): name for name, x in recipes.items()}  # the name that says more
    return {name: recipe for name, recipe in recipes.items() if longest[recipe.layers, recipe.exact] == name}


def _short_names(plan: TunePlan) -> list[str]:
    """Names without groups, which every head dimension has its own of; in a staged search less means."""
    codes = plan.codes
    names = [f"{code.name}_mean" if plan.is_staged and code.is_grouped else code.name for code in codes]
    if {Code.INT8, Code.INT4} <= set(codes):
        names.append("k8v4")
    return [f"{name}{plan.exact}" for name in names]


def _recipes(head_dims: list[tuple[int, int]], names: list[str]) -> dict[str, KVRecipe]:
    recipes: dict[str, KVRecipe] = {}
    for name in names:
        with suppress(UnfitFormat):  # a group of one head dimension that another lacks
            recipes[name] = KVRecipe.uniform(name, head_dims)
    return recipes
