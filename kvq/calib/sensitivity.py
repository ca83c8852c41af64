"""What each format costs in each half of each layer: KL divergence of served decoding, one half at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from kvq.calib.budget import TunePlan, smallest_format
from kvq.calib.candidates import Half, Stored, grouped_formats, halves, recipe_of, staged_alike
from kvq.calib.observe import observe, spread_windows
from kvq.evals.side_by_side import mean_divergences
from kvq.evals.text import EvalText
from kvq.formats import Centers, Code, KVFormat, KVRecipe
from kvq.models import Model

Progress = Callable[[str, int, int], None]  # (what is going on, done, in all)

_SHAPE_BITS = 4  # rotation, centers and means are settled at the code nearest to this width
_FEW_BITS = 2  # a width whose rotation is tried again
_LEAST_COST = 1e-9  # nats: of what differs from the baseline by rounding only


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What storing one half in one way costs, all others unquantized."""

    half: Half
    stored: Stored
    nbytes: Fraction  # per token
    kl: float  # nats per token


Keep = Callable[[Callable[[], list[Trial]]], object]  # told how to make the trials so far


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivities:
    """All trials of a model, and what they were measured with."""

    trials: tuple[Trial, ...]
    centers: Centers
    rest: KVFormat  # of the halves that were not tried
    windows: tuple[list[int], ...]  # token ids

    def of(self, half: Half) -> list[Trial]:
        """The trials of one half."""
        return [trial for trial in self.trials if trial.half == half]


def measure_sensitivities(
    model: Model, text: EvalText, plan: TunePlan, progress: Progress, keep: Keep
) -> Sensitivities:
    """Try each half of each layer in the candidate formats of the plan's codes.

    Rotation, centering and block means are settled per half first, at 4 bits in the largest group; other
    groups and bits then follow it, but for 2 bits, whose rotation is tried again. Its `max_windows` windows
    are spread over the text; centers come from four times as many.

    Raises:
        RequestError: a text or context that can't be used, or K or V that are not finite.
    """
    codes, context = plan.codes, plan.context
    windows = spread_windows(model.prepared, text.text, context=context, max_windows=plan.max_windows)
    centers = observe(
        model,
        text,
        context=context,
        max_windows=4 * plan.max_windows,
        progress=lambda done, total: progress("observing K and V", done, total),
    ).centers()
    bench = _Bench(model, windows, centers, plan, (progress, keep))
    units = halves(model.geometry, model.prepared.block_size)
    bench.measure_floors(units)
    shapes = bench.run({half: _shapes(model, half, plan) for half in units}, "rotation, centers and means")
    settled = {half: min(found, key=_worth).stored for half, found in shapes.items() if found}
    bench.run({half: _widths(half, codes, settled.get(half)) for half in units}, "groups and bits")
    narrow = bench.run({half: _few_bits(half, codes, settled.get(half)) for half in units}, "2 bits")
    bench.run({half: _smaller_groups(half, narrow[half]) for half in units}, "2 bits in smaller groups")
    return Sensitivities(trials=tuple(bench.trials), centers=centers, rest=bench.rest, windows=tuple(windows))


def _cost(trial: Trial) -> float:
    return trial.kl


def _worth(trial: Trial) -> float:
    """Divergence if the bytes were those of others: each bit of an element is worth a factor of four."""
    half = trial.half
    return trial.kl * float(4 ** float(trial.stored.fmt.bits_per_element(half.head_dim, half.block_size)))


def _shapes(model: Model, half: Half, plan: TunePlan) -> list[Stored]:
    """The largest group of the code nearest to 4 bits, rotated or not, with centers or means or neither."""
    grouped = [code for code in plan.codes if code.is_grouped]
    if not grouped:
        return []
    code = min(grouped, key=lambda code: abs(code.bits - _SHAPE_BITS))
    rotated, plain = (grouped_formats(half.head_dim, code, rotated=rotated)[0] for rotated in (True, False))
    can_center = half.part == "v" or model.geometry.softcap is None
    found = [Stored(fmt=rotated), *([Stored(fmt=rotated, is_centered=True)] if can_center else [])]
    best = found[-1]
    if not plan.is_staged:
        return [*found, replace(best, fmt=plain)]
    means = [replace(way, fmt=replace(rotated, mean=True)) for way in found]
    return [best, *means, replace(best, fmt=replace(plain, mean=True))]


def _widths(half: Half, codes: Sequence[Code], shape: Stored | None) -> list[Stored]:
    """INT8, and grouped codes above 2 bits, shaped as `shape`, which was tried already, is."""
    ways = [Stored(fmt=smallest_format(half.head_dim, code)) for code in codes if not code.is_grouped]
    if shape is not None:
        ways += [way for code in codes if code.bits > _FEW_BITS for way in _grouped(half, code, shape)]
    return [way for way in ways if way != shape]


def _few_bits(half: Half, codes: Sequence[Code], shape: Stored | None) -> list[Stored]:
    """2 bits in the largest group, rotated or not, shaped as `shape` is otherwise."""
    few = [code for code in codes if code.bits <= _FEW_BITS]
    if shape is None:
        return []
    shapes = [replace(shape, fmt=replace(shape.fmt, rotated=rotated)) for rotated in (True, False)]
    return [_grouped(half, code, one)[0] for code in few for one in shapes]


def _smaller_groups(half: Half, found: list[Trial]) -> list[Stored]:
    """2 bits in smaller groups, shaped as the best of the largest groups is."""
    if not found:
        return []
    best = min(found, key=_cost).stored
    return _grouped(half, best.fmt.code, best)[1:]


def _grouped(half: Half, code: Code, shape: Stored) -> list[Stored]:
    """All groups of a grouped code, shaped as `shape` is."""
    if not code.is_grouped:
        return []
    formats = grouped_formats(half.head_dim, code, rotated=shape.fmt.rotated)
    return [replace(shape, fmt=replace(fmt, mean=shape.fmt.mean)) for fmt in formats]


class _Bench:
    """Measures halves, a batch of recipes at a time."""

    def __init__(
        self,
        model: Model,
        windows: list[list[int]],
        centers: Centers,
        plan: TunePlan,
        told: tuple[Progress, Keep],
    ) -> None:
        self.trials: list[Trial] = []
        self.rest = model.with_kv("auto").recipe.layers[0].k  # of the halves that are not tried
        self._model, self._windows, self._centers, self._plan = model, windows, centers, plan
        self._progress, self._keep = told
        self._floors: dict[Half, float] = {}

    def measure_floors(self, units: list[Half]) -> None:
        """What it costs to store a half without loss, in weights of 16 bits or beside a staging area.

        Another kernel rounds otherwise, which moves logits of 16 bits, and the staging area is bf16; whole
        recipes have that once, not per half.
        """
        is_exact = self.rest.code is Code.FP32
        if is_exact and not self._plan.is_staged:
            return
        lossless = Stored(fmt=KVFormat(code=Code.FP32))
        tried = units[:1] if is_exact else units  # in fp32 it is the same recipe for all
        found = self.run({half: [lossless] for half in tried}, "exact rows")
        self._floors = {half: found.get(half, found[tried[0]])[0].kl for half in units}
        self.trials.clear()

    def run(self, ways: dict[Half, list[Stored]], what: str) -> dict[Half, list[Trial]]:
        """Trials of every half's ways."""
        pairs = [(half, way) for half, some in ways.items() for way in some]
        recipes = [self._recipe(half, way) for half, way in pairs]
        before = self.trials

        def tell(costs: list[float]) -> None:
            done = [self._trial(half, way, kl) for (half, way), kl in zip(pairs, costs, strict=False)]
            self.trials = [*before, *done]
            self._progress(f"trying {what}", len(done), len(recipes))
            self._keep(self.trials.copy)

        mean_divergences(self._model, recipes, self._windows, progress=tell)
        found: dict[Half, list[Trial]] = {half: [] for half in ways}
        for trial in self.trials[len(before) :]:
            found[trial.half].append(trial)
        return found

    def _recipe(self, half: Half, way: Stored) -> KVRecipe:
        """One half as it is tried, all others unquantized."""
        stored = {(half.layer, half.part): way}
        recipe = recipe_of(self._model.geometry, stored, self.rest, self._centers)
        return staged_alike(recipe, self._plan.exact) if self._plan.is_staged else recipe

    def _trial(self, half: Half, way: Stored, kl: float) -> Trial:
        own = max(kl - self._floors.get(half, 0.0), _LEAST_COST)
        return Trial(half=half, stored=way, nbytes=half.nbytes(way.fmt), kl=own)
