"""What each format costs in each half of each layer: KL divergence of served decoding, one half at a time."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvq.calib.budget import TunePlan
from kvq.calib.candidates import Half, Stored, grouped_formats, halves, recipe_of
from kvq.calib.observe import observe, spread_windows
from kvq.evals.side_by_side import mean_divergences, one_by_one
from kvq.evals.text import EvalText
from kvq.formats import Centers, Code, KVFormat, PerTokenHead
from kvq.kernels.codec import decode, encode, rotate
from kvq.models import Model

Progress = Callable[[str, int, int], None]  # (what is going on, done, in all)

_SAMPLED_ROWS = 1024  # tokens of each layer kept for choosing clips
_CLIP_STEPS = (0.0, 0.1, 0.2)  # tried above the clip of least squared error
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
_LEAST_COST = 1e-9  # nats: of what differs from the baseline by rounding only


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What storing one half in one way costs, all others unquantized."""

    half: Half
    stored: Stored
    nbytes: int  # per token
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

    Rotation and centering are settled per half first, at the largest group of the widest grouped code;
    other groups and bits then follow it, but for 2 bits, whose rotation and clip are tried again.
    Its `max_windows` windows are spread over the text; centers come from four times as many.

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
    bench = _Bench(model, windows, centers, progress, keep)
    units = halves(model.geometry)
    bench.measure_floors(units)
    shapes = bench.run({half: _shapes(model, half, codes) for half in units}, "rotation and centers")
    settled = {half: min(found, key=_cost).stored for half, found in shapes.items() if found}
    widths = bench.run(
        {
            half: _widths(half, codes, settled.get(half)) + bench.two_bits(half, codes, settled)
            for half in units
        },
        "groups and bits",
    )
    bench.run({half: _narrow(half, widths[half]) for half in units}, "2 bits in smaller groups")
    return Sensitivities(trials=tuple(bench.trials), centers=centers, rest=bench.rest, windows=tuple(windows))


def _cost(trial: Trial) -> float:
    return trial.kl


def _shapes(model: Model, half: Half, codes: Sequence[Code]) -> list[Stored]:
    """The largest group of the widest grouped code, rotated or not, centered or not."""
    grouped = [code for code in codes if code in (Code.INT4, Code.INT2)]
    if not grouped:
        return []
    widest = max(grouped, key=lambda code: code.bits)
    can_center = half.part == "v" or model.geometry.softcap is None
    return [
        Stored(fmt=grouped_formats(half.head_dim, widest, rotated=rotated)[0], is_centered=centered)
        for rotated in (True, False)
        for centered in ((True, False) if can_center else (False,))
    ]


def _widths(half: Half, codes: Sequence[Code], shape: Stored | None) -> list[Stored]:
    """INT8, and smaller groups of INT4, shaped as `shape` is."""
    found = []
    if Code.INT8 in codes:
        found.append(Stored(fmt=KVFormat(code=Code.INT8, scale=PerTokenHead())))
    if Code.INT4 in codes and shape is not None:
        formats = grouped_formats(half.head_dim, Code.INT4, rotated=shape.fmt.rotated)
        found += [replace(shape, fmt=fmt) for fmt in formats[1:]]
    return found


def _narrow(half: Half, found: list[Trial]) -> list[Stored]:
    """2 bits in smaller groups, shaped and clipped as the best of the largest groups is."""
    tried = [trial for trial in found if trial.stored.fmt.code is Code.INT2]
    if not tried:
        return []
    best = min(tried, key=_cost).stored
    formats = grouped_formats(half.head_dim, Code.INT2, rotated=best.fmt.rotated)[1:]
    return [replace(best, fmt=fmt) for fmt in formats]


class _Bench:
    """Measures halves, a batch of recipes at a time."""

    def __init__(
        self, model: Model, windows: list[list[int]], centers: Centers, progress: Progress, keep: Keep
    ) -> None:
        self.trials: list[Trial] = []
        self.rest = model.with_kv("auto").recipe.layers[0].k  # of the halves that are not tried
        self._model, self._windows, self._centers = model, windows, centers
        self._progress, self._keep = progress, keep
        self._floors: dict[Half, float] = {}

    def measure_floors(self, units: list[Half]) -> None:
        """What it costs to store a half without loss, in weights of 16 bits.

        Another kernel rounds otherwise, which moves their logits; whole recipes have that once, not per half.
        """
        if self.rest.code is Code.FP32:
            return
        lossless = Stored(fmt=KVFormat(code=Code.FP32))
        found = self.run({half: [lossless] for half in units}, "exact rows")
        self._floors = {half: trials[0].kl for half, trials in found.items()}
        self.trials.clear()

    def run(self, ways: dict[Half, list[Stored]], what: str) -> dict[Half, list[Trial]]:
        """Trials of every half's ways."""
        pairs = [(half, way) for half, some in ways.items() for way in some]
        recipes = [
            recipe_of(self._model.geometry, {(half.layer, half.part): way}, self.rest, self._centers)
            for half, way in pairs
        ]
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

    def _trial(self, half: Half, way: Stored, kl: float) -> Trial:
        own = max(kl - self._floors.get(half, 0.0), _LEAST_COST)
        return Trial(half=half, stored=way, nbytes=half.nbytes(way.fmt), kl=own)

    def two_bits(self, half: Half, codes: Sequence[Code], settled: dict[Half, Stored]) -> list[Stored]:
        """2 bits in the largest group, rotated or not, with clips from that of least squared error up.

        Large elements count for more in attention than in squared errors: less clipping is often better.
        """
        if Code.INT2 not in codes:
            return []
        found = []
        for rotated in (True, False):
            fmt = grouped_formats(half.head_dim, Code.INT2, rotated=rotated)[0]
            way = replace(settled[half], fmt=fmt)
            least = best_clip(self._rows(half, way.is_centered), fmt)
            found += [replace(way, clip=min(1.0, round(least + step, 2))) for step in _CLIP_STEPS]
        return list(dict.fromkeys(found))

    def _rows(self, half: Half, is_centered: bool) -> Tensor:
        """Some rows of a half, spread over the windows: fp32 [up to _SAMPLED_ROWS, kv_heads, dim]."""
        own = self._centers.layers[half.layer]
        center = own.k if half.part == "k" else own.v
        rows = self._samples[half.layer, half.part]
        return rows - torch.tensor(center) if is_centered and center is not None else rows

    @cached_property
    def _samples(self) -> dict[tuple[int, str], Tensor]:
        each = -(-_SAMPLED_ROWS // len(self._windows))
        seen: dict[tuple[int, str], list[Tensor]] = defaultdict(list)

        def take(layer: int, k: Tensor, v: Tensor) -> None:
            step = max(1, k.shape[0] // each)
            for part, rows in (("k", k), ("v", v)):
                seen[layer, part].append(rows[::step].float().cpu())

        watched = self._model.with_kv("fp32").session(max_tokens=max(map(len, self._windows)))
        watched.observer = take
        for _ in one_by_one(watched, self._windows):
            pass
        return {half: torch.cat(rows) for half, rows in seen.items()}


def best_clip(rows: Tensor, fmt: KVFormat) -> float:
    """The clip among `CLIPS` whose decoded rows lie nearest to `rows`, fp32 [tokens, kv_heads, dim].

    Few levels over the whole range leave large steps for the many elements near the middle; for normally
    distributed elements four levels serve best over about two thirds of a group's range.
    Source: Max 1960, Quantizing for minimum distortion, for the trade.
    """
    target = rotate(rows) if fmt.rotated else rows  # decoded rows are rotated still, and distances the same

    def error(clip: float) -> float:
        decoded = decode(*encode(rows, fmt, clip=clip), fmt)
        return float((decoded - target).square().double().sum())

    return min(CLIPS, key=error)
