"""Finding the recipe that costs least quality within a memory budget, and proving it.

What each half of each layer costs in each format is measured alone (`kvq.calib.sensitivity`). Small
divergences add up well, so a knapsack finds the best recipe for every budget at once; recipes are then
measured whole, on text that the search did not see, beside the uniform formats.

Source: per-layer pairs of formats from Li et al. 2025, KVTuner; the search here is exact instead.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvq.calib.allocate import Allocation, Option
from kvq.calib.budget import TunePlan, bytes_of_bits, recipe_bytes
from kvq.calib.candidates import grouped_formats, halves, recipe_of
from kvq.calib.observe import spread_windows
from kvq.calib.sensitivity import Keep, Progress, Sensitivities, measure_sensitivities
from kvq.errors import ConfigError
from kvq.evals.perplexity import PerplexityRow, measure_perplexity
from kvq.evals.side_by_side import mean_divergences
from kvq.evals.text import EvalText
from kvq.formats import Code, KVRecipe, parse_format
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


class Search:
    """The best recipe for every budget, from sensitivities."""

    def __init__(self, model: Model, found: Sensitivities) -> None:
        self._geometry = model.geometry
        self._found = found
        self._units = halves(model.geometry)
        self.allocation = Allocation(
            [
                [Option(choice=t.stored, nbytes=t.nbytes, cost=t.kl) for t in found.of(half)]
                for half in self._units
            ]
        )

    def recipe(self, budget: int, label: str) -> KVRecipe:
        """The recipe of least expected cost within `budget` bytes per token."""
        chosen = self.allocation.choose(budget)
        stored = {(half.layer, half.part): way for half, way in zip(self._units, chosen, strict=True)}
        return recipe_of(self._geometry, stored, self._found.rest, self._found.centers, label)


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
    search = Search(model, found)
    uniform = _uniform(model, plan.codes)
    budget_bytes = plan.budget_bytes
    if budget_bytes is None:
        assert plan.max_kl is not None, "one of both is given"
        budget_bytes = _budget_for(model, search, found, plan.max_kl)
    windows = spread_windows(model.prepared, text.text, context=window, max_windows=2 * plan.max_windows)
    unseen = [ids for ids in windows if ids not in found.windows]
    recipe, search_kl, is_tuned = _best(model, search, uniform, budget_bytes, unseen or windows)
    others = _others(model, search, uniform, budget_bytes)
    rows = measure_perplexity(
        model,
        ["auto", *uniform.values(), *others, replace(recipe, label="chosen")],
        held_out.text,
        context=window,
        max_windows=plan.verify_windows,
        progress=lambda done, total: progress("verifying whole recipes", done, total),
    )
    expected = [search.allocation.cost(recipe_bytes(model.geometry, other)) for other in others]
    first, last = 1 + len(uniform), 1 + len(uniform) + len(others)
    points = [Point(kind="uniform", row=row) for row in rows[:first]]
    points += [
        Point(kind="tuned", row=row, expected_kl=kl)
        for row, kl in zip(rows[first:last], expected, strict=True)
    ]
    expected_kl = search.allocation.cost(budget_bytes) if is_tuned else None
    points.append(Point(kind="chosen", row=rows[last], expected_kl=expected_kl))
    return Tuned(
        recipe=recipe,
        budget_bytes=budget_bytes,
        expected_kl=search.allocation.cost(budget_bytes),
        search_kl=search_kl,
        points=tuple(points),
        sensitivities=found,
    )


def _uniform(model: Model, codes: Sequence[Code]) -> dict[str, KVRecipe]:
    """The uniform formats to compare with: every group of the codes, rotated and not."""
    dims = model.geometry.head_dims
    names = ["int8"] if Code.INT8 in codes else []
    if {Code.INT8, Code.INT4} <= set(codes):
        names.append("k8v4")
    for code in (Code.INT4, Code.INT2):
        if code in codes:
            names.append(code.name)  # the default group of every head dimension, which may differ
            for rotated in (True, False):
                formats = grouped_formats(min(min(pair) for pair in dims), code, rotated=rotated)
                names += [fmt.name for fmt in formats if _fits(fmt.name, dims)]
    recipes = {name: KVRecipe.uniform(name, dims) for name in names}
    known: dict[object, str] = {}
    for name, recipe in recipes.items():
        known[recipe.layers] = name  # of two names for the same formats the longer, which says more
    return {name: recipes[name] for name in recipes if name in known.values()}


def _fits(name: str, head_dims: list[tuple[int, int]]) -> bool:
    try:
        for dim in {dim for pair in head_dims for dim in pair}:
            parse_format(name, dim).check(dim)
    except ConfigError:
        return False
    return True


def _budget_for(model: Model, search: Search, found: Sensitivities, max_kl: float) -> int:
    """Few bytes per token at which the whole recipe, measured on the search's text, meets `max_kl`.

    Expected and measured divergence are nearly proportional, so a few tries narrow it down from both sides.
    """
    target, tried = max_kl, dict[int, float]()
    for _ in range(_TRIES):
        budget = search.allocation.budget_for(target)
        if budget in tried:
            break
        tried[budget] = mean_divergences(model, [search.recipe(budget, "tried")], found.windows)[0]
        target *= 0.98 * max_kl / tried[budget]
    enough = [budget for budget, kl in tried.items() if kl <= max_kl]
    if not enough:
        raise ConfigError(
            f"no recipe with a KL divergence of {max_kl:g} or less was found; the best had "
            f"{min(tried.values()):.3g}"
        )
    return min(enough)


def _best(
    model: Model,
    search: Search,
    uniform: dict[str, KVRecipe],
    budget: int,
    windows: list[list[int]],
) -> tuple[KVRecipe, float, bool]:
    """The recipe of least divergence within a budget, its divergence, and whether it is the search's.

    `windows`: others than costs were measured on, where there are any; those would favour the search's.
    """
    rivals = [recipe for recipe in uniform.values() if recipe_bytes(model.geometry, recipe) <= budget]
    recipes = [search.recipe(budget, "tuned"), *rivals]
    costs = mean_divergences(model, recipes, windows)
    best = min(range(len(recipes)), key=costs.__getitem__)
    recipe = replace(recipes[best], label="", model_digest=model.weights.digest)
    return recipe, costs[best], best == 0


def _others(model: Model, search: Search, uniform: dict[str, KVRecipe], budget: int) -> list[KVRecipe]:
    """Tuned recipes at the bytes of the uniform formats, and between, for the front."""
    sizes = sorted({recipe_bytes(model.geometry, recipe) for recipe in uniform.values()})
    between = [(low + high) // 2 for low, high in itertools.pairwise(sizes)]
    one_bit = bytes_of_bits(model.geometry, 1.0)
    return [
        search.recipe(size, f"tuned, {size / one_bit:.3g} bits")
        for size in sorted({*sizes, *between} - {budget})
        if size < search.allocation.most_bytes
    ]
