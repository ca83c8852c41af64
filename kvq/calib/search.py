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
from kvq.calib.candidates import grouped_formats, halves, has_fast_kernel, recipe_of
from kvq.calib.divergence import mean_divergences
from kvq.calib.observe import spread_windows
from kvq.calib.sensitivity import Keep, Progress, Sensitivities, measure_sensitivities
from kvq.errors import ConfigError, RequestError
from kvq.evals.perplexity import PerplexityRow, measure_perplexity
from kvq.evals.text import EvalText
from kvq.evals.windows import token_windows
from kvq.formats import Code, KVFormat, KVRecipe, PerTokenHead, parse_format
from kvq.geometry import ModelGeometry
from kvq.models import Model
from kvq.models.prepared import PreparedModel

ALL_CODES = (Code.INT8, Code.INT4, Code.INT2)
_TRIES = 8  # to meet a limit of divergence, which costs add up to only nearly
_LEAST_WINDOW = 32  # tokens


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
    *,
    budget_bytes: int | None = None,
    max_kl: float | None = None,
    codes: Sequence[Code] = ALL_CODES,
    context: int | None = None,
    max_windows: int = 8,
    verify_windows: int = 16,
    progress: Progress = lambda what, done, total: None,
    keep: Keep = lambda make: None,
) -> Tuned:
    """Search on `text`, verify on `held_out`. `keep` is told now and then how to make the trials so far.

    Exactly one of `budget_bytes` (per token, block padding not counted) and `max_kl` (nats per token)
    is given. The recipe is the best that was found on `text`: a uniform format that fits the budget and
    is better there wins.

    Raises:
        ConfigError: both or neither were given, or no choice of formats meets them.
        RequestError: a text or context that can't be used.
    """
    if (budget_bytes is None) == (max_kl is None):
        raise ConfigError("give either a budget in bytes or the largest KL divergence, not both")
    window = check_tune(
        model.prepared,
        text,
        held_out,
        budget_bytes=budget_bytes,
        codes=codes,
        context=context,
        max_windows=max_windows,
    )
    found = measure_sensitivities(
        model, text, codes=codes, context=context, max_windows=max_windows, progress=progress, keep=keep
    )
    search = Search(model, found)
    uniform = _uniform(model, codes)
    if budget_bytes is None:
        assert max_kl is not None, "checked above"
        budget_bytes = _budget_for(model, search, found, max_kl)
    windows = spread_windows(model.prepared, text.text, context=window, max_windows=2 * max_windows)
    unseen = [ids for ids in windows if ids not in found.windows]
    recipe, search_kl, is_tuned = _best(model, search, uniform, budget_bytes, unseen or windows)
    others = _others(model, search, uniform, budget_bytes)
    rows = measure_perplexity(
        model,
        ["auto", *uniform.values(), *others, replace(recipe, label="chosen")],
        held_out.text,
        context=window,
        max_windows=verify_windows,
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


def check_tune(
    model: PreparedModel,
    text: EvalText,
    held_out: EvalText,
    *,
    budget_bytes: int | None,
    codes: Sequence[Code],
    context: int | None,
    max_windows: int,
) -> int:
    """Tokens of a window, if `tune` can work with what it is given; asked before the weights are loaded.

    Raises:
        ConfigError: a budget below the smallest formats searched.
        RequestError: a text or context that can't be used.
    """
    least = smallest_bytes(model.geometry, codes)
    if budget_bytes is not None and budget_bytes < least:
        raise ConfigError(
            f"the budget is {budget_bytes} bytes per token; the smallest formats searched take {least}"
        )
    window = len(spread_windows(model, text.text, context=context, max_windows=max_windows)[0])
    if window < _LEAST_WINDOW:
        raise RequestError(
            f"windows of {window} tokens say little of what a recipe costs; give --text (and --context) of "
            f"at least {_LEAST_WINDOW} tokens"
        )
    token_windows(model.tokenizer, held_out.text, context=window)
    return window


def recipe_bytes(geometry: ModelGeometry, recipe: KVRecipe) -> int:
    """Bytes per token of a recipe's rows, scales included, block padding not."""
    return sum(
        half.nbytes(recipe.layers[half.layer].k if half.part == "k" else recipe.layers[half.layer].v)
        for half in halves(geometry)
    )


def bytes_of_bits(geometry: ModelGeometry, bits: float) -> int:
    """Bytes per token of so many bits per element."""
    return int(bits * sum(half.kv_heads * half.head_dim for half in halves(geometry)) / 8 + 1e-6)


def default_codes(model: PreparedModel, budget_bytes: int | None) -> tuple[Code, ...]:
    """Codes whose attention has a compiled kernel here; all, where the budget can't be met with those."""
    fast = tuple(
        code
        for code in ALL_CODES
        if all(
            has_fast_kernel(model.geometry, half, smallest_format(half.head_dim, code), model.device)
            for half in halves(model.geometry)
        )
    )
    if not fast or (budget_bytes is not None and budget_bytes < smallest_bytes(model.geometry, fast)):
        return ALL_CODES
    return fast


def smallest_bytes(geometry: ModelGeometry, codes: Sequence[Code]) -> int:
    """Bytes per token where every half takes the smallest format of these codes."""
    return sum(
        min(half.nbytes(smallest_format(half.head_dim, code)) for code in codes) for half in halves(geometry)
    )


def smallest_format(head_dim: int, code: Code) -> KVFormat:
    """The format of a code that takes the fewest bytes."""
    if code is Code.INT8:
        return KVFormat(code=code, scale=PerTokenHead())
    return grouped_formats(head_dim, code, rotated=True)[0]


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
