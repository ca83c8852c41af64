"""`kvq tune`: the recipe that costs least quality within a memory budget."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.options import Finite, ModelOptions, model_argument, model_options, text_options
from kvq.commands.screen import echo
from kvq.errors import ConfigError
from kvq.extras import PLOTS, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvq.calib.search import Tuned
    from kvq.calib.sensitivity import Trial
    from kvq.evals import EvalText
    from kvq.models import Model
    from kvq.models.prepared import PreparedModel

DEFAULT_BUDGET = "int4"
_DEAR = 0.05  # relative change of perplexity
_TRIAL = {  # key -> its column where a search is not finished
    "layer": ("layer", "d"),
    "part": ("part", ""),
    "format": ("format", ""),
    "centered": ("centered", str),
    "bytes_per_token": ("bytes / token", ",d"),
    "kl": ("KL alone", ".6f"),
}
_MOST_SHARED = 0.1  # of the held-out text's long lines


@click.command(name="tune")
@model_argument
@click.option(
    "--budget",
    help="Bits per element (4.5bits), bytes per token (900B), or a format's bytes.  "
    f"[default: {DEFAULT_BUDGET}]",
)
@click.option(
    "--max-kl", type=Finite(min=0, min_open=True), help="Instead: mean KL divergence to stay below."
)
@text_options("help topics of CPython that are not held out")
@click.option(
    "--held-out",
    type=click.Path(),
    help="Text to measure on.  [default: the last third of --text, or held-out help topics]",
)
@click.option(
    "--formats", help="Codes to choose from: int8,int4,int2.  [default: those with fast kernels here]"
)
@click.option(
    "--out", default="kvq.json", show_default=True, type=click.Path(), help="Where the recipe goes."
)
@click.option("--context", type=int, help="Tokens per window.  [default: 1024, or what the model takes]")
@click.option("--max-windows", default=8, show_default=True, type=click.IntRange(min=1), help="To search on.")
@click.option(
    "--verify-windows", default=16, show_default=True, type=click.IntRange(min=1), help="To measure on."
)
@click.option("--json", "json_path", type=click.Path(), help="Write all that was measured as JSON.")
@click.option("--plot", "plot_path", type=click.Path(), help="Write the Pareto front (.svg, .png or .pdf).")
@click.option(
    "--html", "html_path", type=click.Path(), help="Write a page that needs no other file, JSON beside it."
)
@model_options
def command(
    model_options: ModelOptions,
    budget: str | None,
    max_kl: float | None,
    text: str | None,
    text_field: str | None,
    held_out: str | None,
    formats: str | None,
    out: str,
    json_path: str | None,
    plot_path: str | None,
    html_path: str | None,
    **options: Any,
) -> None:
    """Find formats for K and V of every layer of MODEL, within a budget, and write a kvq.json.

    Each half of each layer is stored in each format alone, with and without rotation and centering, and the
    divergence of what is served measured. From these the best recipe within the budget follows; it is
    measured whole, beside the uniform formats, on text that the search did not see. `--kv kvq.json`
    serves it.
    """
    from kvq import fileio
    from kvq.calib.budget import TunePlan, default_codes, parse_budget
    from kvq.calib.candidates import codes_of
    from kvq.calib.search import tune
    from kvq.calib.tune_report import sensitivity_rows
    from kvq.commands.finished import FinishedRows
    from kvq.commands.loading import check_for
    from kvq.commands.progress import named_progress
    from kvq.evals.figure import check_plot_path
    from kvq.evals.results import source_commit
    from kvq.weights.manifest import relist

    if budget is not None and max_kl is not None:
        raise ConfigError("--budget and --max-kl are two ends of one trade; give one of them")
    if plot_path is not None:
        check_plot_path(plot_path)
    if html_path is not None:
        require("--html", PLOTS)
    codes = None if formats is None else codes_of(formats.split(","))
    source, other = _texts(text, text_field, held_out)
    if html_path is not None and json_path is None:
        json_path = str(Path(html_path).with_suffix(".json"))
    paths = [path for path in (out, json_path, plot_path, html_path) if path is not None]
    if len({fileio.check_writable(path) for path in paths}) < len(paths):
        raise ConfigError(
            f"two results would go into one file: {', '.join(paths)}; name --json apart from --out"
        )
    checked = check_for(model_options, ["auto"])
    known = checked.prepared
    nbytes = None if max_kl is not None else parse_budget(known, budget or DEFAULT_BUDGET)
    if codes is None:
        codes = default_codes(known, nbytes)
        _say_codes(known, codes)
    plan = TunePlan(budget_bytes=nbytes, max_kl=max_kl, codes=codes, **options)
    plan.check(known, source, other)
    source_commit()
    model = checked.load()
    began = time.perf_counter()

    def unfinished(trials: "Sequence[Trial]") -> dict[str, Any]:
        return _envelope(model, source, other, [], sensitivities=sensitivity_rows(trials))

    with FinishedRows(json_path, unfinished, _print_trials) as finished:
        with named_progress() as progress:
            tuned = tune(model, source, other, plan, progress=progress, keep=finished.keep)
        tuned.recipe.save(out)
        relist(out)
        result = _result(model, source, other, tuned, time.perf_counter() - began)
        finished.finish(result)
    _print(result, out)
    _write(result, plot_path, html_path)
    if tuned.chosen.perplexity_change > _DEAR and len(codes) < 3:
        echo(
            "that is a lot of perplexity: a few layers may need 8 bits, which others can pay for with 2; "
            "try --formats int8,int4,int2"
        )
    if max_kl is not None and tuned.chosen.kl_mean > max_kl:
        echo(
            f"on {other.name}, which the search did not see, the mean KL is {tuned.chosen.kl_mean:.3g}, "
            f"above --max-kl {max_kl:g}; search on more text (--max-windows), or ask for less"
        )
        sys.exit(1)


def _texts(text: str | None, field: str | None, held_out: str | None) -> "tuple[EvalText, EvalText]":
    """The text to search on, and the one to measure on, which share nothing."""
    from kvq.evals import EvalText, calibration_text, default_text, read_text
    from kvq.evals.text import shared_lines

    if text is None:
        other = default_text() if held_out is None else read_text(held_out, field)
        return calibration_text(), other
    source = read_text(text, field)
    if held_out is not None:
        other = read_text(held_out, field)
        shared = shared_lines(source.text, other.text)
        if other.digest == source.digest or shared > _MOST_SHARED:
            raise ConfigError(
                f"--held-out shares {shared:.0%} of its long lines with --text; give one that the search "
                f"does not see, or leave it out: then the last third of --text is held out"
            )
        return source, other
    cut = 2 * len(source.text) // 3
    return (
        EvalText(name=f"{source.name}, first two thirds", text=source.text[:cut]),
        EvalText(name=f"{source.name}, last third", text=source.text[cut:]),
    )


def _say_codes(model: "PreparedModel", codes: Any) -> None:
    from kvq.calib.budget import smallest_format
    from kvq.calib.candidates import halves, has_fast_kernel

    half = halves(model.geometry)[0]
    slow = [
        code.name
        for code in codes
        if not has_fast_kernel(model.geometry, half, smallest_format(half.head_dim, code), model.device)
    ]
    if slow:
        echo(
            f"kvq: {', '.join(slow)} has no fast kernel here: layers stored so are read by the slow "
            f"reference kernel. --formats chooses others.",
            err=True,
        )


def _result(
    model: "Model", source: "EvalText", other: "EvalText", tuned: "Tuned", seconds: float
) -> dict[str, Any]:
    from kvq.calib.tune_report import point_rows, recipe_rows, sensitivity_rows, verdict

    return _envelope(
        model,
        source,
        other,
        point_rows(tuned),
        context=len(tuned.sensitivities.windows[0]),
        seconds=seconds,
        budget_bytes=tuned.budget_bytes,
        expected_kl=tuned.expected_kl,
        search_kl=tuned.search_kl,
        verdict=verdict(tuned),
        recipe=recipe_rows(model, tuned.recipe),
        sensitivities=sensitivity_rows(tuned.sensitivities.trials),
    )


def _envelope(
    model: "Model", source: "EvalText", other: "EvalText", rows: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    from kvq.commands.results import result_of

    return result_of(
        rows,
        model.weights.device,
        model=model.title,
        model_digest=model.weights.digest,
        text=source.name,
        text_digest=source.digest,
        held_out=other.name,
        held_out_digest=other.digest,
        **more,
    )


def _print(result: dict[str, Any], out: str) -> None:
    from kvq.calib.tune_report import HEADS, point_cells
    from kvq.commands.tables import console, new_table

    screen = console()
    recipe = new_table(("layer", "K", "V"), ("layer", "K", "V"), no_wrap=False)
    for cells in result["recipe"]:
        recipe.add_row(*cells)
    points = new_table(HEADS, ("recipe",))
    for row in result["rows"]:
        points.add_row(*point_cells(row))
    screen.print(recipe)
    screen.print(f"\non {result['held_out']}; * is on the front: nothing smaller is better", highlight=False)
    screen.print(points)
    echo(f"\nwrote {out} in {result['seconds']:,.0f} s: {result['verdict']}")


def _print_trials(result: dict[str, Any]) -> None:
    from kvq.commands.tables import print_columns

    print_columns(result["sensitivities"], _TRIAL)


def _write(result: dict[str, Any], plot_path: str | None, html_path: str | None) -> None:
    from kvq.calib.tune_report import write_front, write_report

    if html_path:
        write_report(html_path, result)
    if plot_path:
        write_front(plot_path, result["rows"])
