"""Tuning report: JSON rows, a plot of the Pareto front, and a self-contained page."""

import dataclasses
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from kvq import fileio, strict_json
from kvq.calib.candidates import Trial, format_in, formats_of, halves
from kvq.calib.search import Tuned
from kvq.errors import ConfigError, first_lines
from kvq.evals.report.bootstrap import Bootstrap
from kvq.evals.report.figure import drawing, finish, legend_beside, new_figure, short
from kvq.evals.report.labels import label_point
from kvq.evals.report.page import Columns, bits, columns_of, html_table, origin, page, sizes, table
from kvq.evals.report.plot import finish_kl
from kvq.evals.report.sections import MOST, exactness_warning
from kvq.formats import KVRecipe, parse_format
from kvq.models import Model
from kvq.models.check.verdict import verdict as verdict_of

Row = dict[str, Any]
_QUALITY = columns_of("tune")
RECIPE = ("layer", "K", "V")
_KINDS = {"uniform": ("#7d8590", "o"), "tuned": ("#0969da", "s"), "chosen": ("#cf222e", "D")}


def point_rows(tuned: Tuned) -> list[Row]:
    """Return the verified points as JSON rows, with the keys of `kvq perplexity` and each point's kind."""
    front = {id(point) for point in tuned.front()}
    return [
        {
            **dataclasses.asdict(point.row),
            "kind": point.kind,
            "kl_mean_interval": Bootstrap().interval(np.positive, point.window_kl),
            "expected_kl": point.expected_kl,
            **({} if point.decisive_kl is None else {"decisive_kl": point.decisive_kl}),
            "is_on_front": id(point) in front,
        }
        for point in tuned.points
    ]


def tuned_facts(model: Model, tuned: Tuned) -> Row:
    """Return the report's JSON fields other than the points."""
    return {
        "cautions": list(tuned.cautions),
        "budget_bytes": tuned.budget_bytes,
        "expected_kl": tuned.expected_kl,
        "search_kl": tuned.search_kl,
        "is_staged": tuned.recipe.is_staged,
        "rival": tuned.rival and tuned.rival.row.kv,
        "ratio_to_rival": tuned.rival and tuned.points[-1].ratio(tuned.rival),
        "verdict": verdict(tuned),
        "recipe": recipe_rows(model, tuned.recipe),
        "sensitivities": sensitivity_rows(tuned.sensitivities.trials),
    }


def sensitivity_rows(trials: Iterable[Trial]) -> list[Row]:
    """Return the cost of each half of each layer in each format, as JSON rows."""
    return [
        {
            "layer": trial.half.layer,
            "part": trial.half.part,
            "format": trial.fmt.name,
            "bytes_per_token": float(trial.nbytes),
            "kl": trial.kl,
            "is_estimated": trial.is_estimated,
        }
        for trial in trials
    ]


def read_trials(path: str | Path, model: Model, same: Row) -> list[Trial]:  # D32
    """Read the measurements of a finished or interrupted search from its JSON.

    `same`: JSON fields and the values that they must have.

    Raises:
        ConfigError: the file can't be read, or belongs to another search.
    """
    units = {(half.layer, half.part): half for half in halves(model.geometry, model.prepared.block_size)}
    trials: list[Trial] = []
    try:
        found = strict_json.read(Path(path))
        for name, value in same.items():
            if found[name] != value:
                raise ConfigError(f"its {name} is {found[name]!r}, here it is {value!r}")
        for row in found["sensitivities"]:
            half = units[row["layer"], row["part"]]
            fmt = parse_format(row["format"], half.head_dim)
            searched = formats_of(half, fmt.code, whole_blocks=model.prepared.cache == "kvq")
            if fmt not in searched or row["bytes_per_token"] != float(half.nbytes(fmt)):
                raise ConfigError("it was made for blocks of another size or for another cache")
            trials.append(Trial(half=half, fmt=fmt, kl=float(row["kl"]), is_estimated=row["is_estimated"]))
    except (OSError, ValueError, LookupError, TypeError, ConfigError) as error:
        raise ConfigError(f"--costs {path} can't be used: {first_lines(error)}") from error
    return trials


def recipe_rows(model: Model, recipe: KVRecipe) -> list[list[str]]:
    """Return a recipe as a table: layer, K, V."""
    cells: dict[int, list[str]] = {}
    for half in halves(model.geometry):
        cells.setdefault(half.layer, [str(half.layer)]).append(format_in(recipe, half).name)
    return list(cells.values())


def point_columns(rows: Sequence[Row]) -> Columns:
    """Return the columns of the table of points."""
    shown = {name: one for name, one in _QUALITY.items() if name != "decisive_kl" or name in rows[0]}
    return {"kv": ("recipe", ""), **sizes(rows), **shown}


def marked(rows: list[Row]) -> list[Row]:
    """Return the rows for the table of points, with a star for those on the front."""
    return [row | {"kv": f"{row['kv']} *"} if row["is_on_front"] else row for row in rows]


def front_figure(rows: list[Row]) -> Any:
    """Plot mean KL (logarithmic) against bits per element: uniform formats, tuned recipes, and the front."""
    shown = [row for row in rows if row["kl_mean"] > 0]
    figure = new_figure(9.6, 4.6)
    axes = figure.subplots()
    front = sorted((row["bits_per_element"], row["kl_mean"]) for row in shown if row["is_on_front"])
    axes.plot(*zip(*front, strict=True), color=_KINDS["tuned"][0], lw=1.2, zorder=2, label="front")
    for kind, (color, marker) in _KINDS.items():
        points = [(row["bits_per_element"], row["kl_mean"]) for row in shown if row["kind"] == kind]
        x, y = [bits for bits, _ in points], [kl for _, kl in points]
        axes.scatter(x, y, color=color, marker=marker, s=30, zorder=3, label=kind)
    for row in shown:
        if row["kind"] == "uniform":
            label_point(axes, short(row["kv"]), (row["bits_per_element"], row["kl_mean"]), 7)
    finish_kl(axes, "bits per stored element, scales included")
    legend_beside(figure, axes)
    return figure


def sensitivity_figure(rows: list[Row]) -> Any:
    """Plot the minimum divergence (logarithmic) of each code, as bars for every half."""
    least: dict[str, dict[tuple[str, int], float]] = {}  # keyed by code
    for row in rows:
        of_code = least.setdefault(row["format"].split("_")[0], {})
        unit = (row["part"], row["layer"])
        of_code[unit] = min(row["kl"], of_code.get(unit, row["kl"]))
    units = sorted({(row["part"], row["layer"]) for row in rows})
    figure = new_figure(9.6, 3.6)
    axes = figure.subplots()
    for place, code in enumerate(sorted(least, key=lambda code: -int(code[3:]))):
        at = [index + 0.8 * ((place + 0.5) / len(least) - 0.5) for index in range(len(units))]
        axes.bar(at, [least[code][unit] for unit in units], width=0.8 / len(least), label=f"best {code}")
    axes.set_xticks(range(len(units)), [f"{part.upper()}{layer}" for part, layer in units])
    axes.set_yscale("log")
    finish(axes, "", "mean KL divergence alone")
    legend_beside(figure, axes)
    return figure


def write_report(path: str | Path, result: Row) -> None:
    """Write the report page. `result`: the JSON of `kvq tune --json`."""
    parts = [
        f"<h1>A KV recipe for {escape(result['model'])}</h1>",
        *(f'<p class="bad"><b>Mind: {escape(line)}.</b></p>' for line in result["cautions"]),
        f"<p>{escape(result['verdict'])}</p>",
        f'<p class="small">Searched on {escape(result["text"])}, measured on {escape(result["held_out"])}, '
        f"which the search did not see; windows of {result['context']}. {escape(result['device'])}, "
        f"{escape(result['date'])}. Every token went through kvq's own write-then-read path.</p>",
        drawing(front_figure, result["rows"]),
        "<h2>Measured</h2>",
        html_table(*table(marked(result["rows"]), point_columns(result["rows"]))),
        "<h2>The recipe</h2>",
        html_table(RECIPE, result["recipe"]),
        "<h2>What each half costs alone</h2>",
        drawing(sensitivity_figure, result["sensitivities"]),
        origin(result),
    ]
    fileio.write_text(path, page(f"kvq tune: {result['model']}", parts))


def verdict(tuned: Tuned) -> str:
    """Return the result in a sentence or two."""
    chosen = tuned.chosen
    of = "" if tuned.cautions else f", {verdict_of(chosen.kl_mean, chosen.perplexity_change)}"
    words = (
        f"{chosen.bits_per_element:.4g} bits per element, {chosen.compression:.2f} times bf16's tokens in "
        f"the same memory{_staging(tuned)}: mean KL {chosen.kl_mean:.5f}, "
        f"perplexity {chosen.perplexity_change:+.2%}{of}"
    )
    rival = tuned.rival
    if rival is None:
        return f"{words}; no uniform format is as small.{_mind(tuned)}"
    best, times = rival.row, ""
    if best.kl_mean:
        bounds = tuned.points[-1].ratio(rival)
        between = f" (95%: {bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else ""
        times = f": the recipe has {chosen.kl_mean / best.kl_mean:.2f}{between} times that"
    return (
        f"{words}. The best uniform format of at most these bytes, {best.kv} "
        f"({best.bits_per_element:.4g} bits), has {best.kl_mean:.5f}{times}.{_mind(tuned)}"
    )


def _mind(tuned: Tuned) -> str:
    """Return a warning if most keys in the measurement are unquantized, else an empty string."""
    share = tuned.chosen.exact_keys
    return f" Mind: {exactness_warning('it', share, _context(tuned))}." if share > MOST else ""


def _context(tuned: Tuned) -> int:
    return len(tuned.sensitivities.windows[0])


def _staging(tuned: Tuned) -> str:
    """Return a description of the tokens that a staged recipe keeps unquantized; "" for other recipes."""
    if not tuned.recipe.is_staged:
        return ""
    exact, size = tuned.recipe.exact, tuned.sensitivities.trials[0].half.block_size
    sinks = f" and its first {-(-exact.sinks // size) * size}" if exact.sinks else ""  # whole blocks
    return (
        f" but for a sequence's youngest {exact.recent + size} tokens{sinks}, which wait in bf16 "
        f"({bits(tuned.chosen.bits_held)} bits held at {_context(tuned):,} tokens)"
    )
