"""`kvq perplexity`: what KV formats save and what they cost."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.options import ModelOptions, kv_option, model_options, text_options, window_options
from kvq.extras import PLOTS, require

if TYPE_CHECKING:
    from kvq.evals import EvalText
    from kvq.models import Model

DEFAULT_KV = "fp32,bf16,fp8,int8,int4"


@click.command(name="perplexity")
@kv_option(DEFAULT_KV, many=True)
@model_options
@text_options("held-out help topics of CPython")
@window_options
@click.option(
    "--attention-window",
    type=click.IntRange(min=1),
    help="Cut attention to this many tokens, to see what context is worth.",
)
@click.option(
    "--instrument", is_flag=True, help="Also check that model and text can show damage; exit 1 if not."
)
@click.option("--json", "json_path", type=click.Path(), help="Write the rows as JSON.")
@click.option("--plot", "plot_path", type=click.Path(), help="Write a plot (.svg, .png or .pdf).")
@click.option("--html", "html_path", type=click.Path(), help="Write a report that needs no other file.")
def command(
    kv: list[str],
    model_options: ModelOptions,
    text: str | None,
    text_field: str | None,
    context: int,
    max_windows: int | None,
    chunk: int | None,
    attention_window: int | None,
    instrument: bool,
    json_path: str | None,
    plot_path: str | None,
    html_path: str | None,
) -> None:
    """Measure what KV formats cost on a text.

    Perplexity, KL divergence and top-1 agreement are against the first unquantized format listed,
    over tokens that go through kvq's own write-then-read path.
    """
    from kvq import fileio
    from kvq.commands.loading import check_for
    from kvq.evals import default_text, read_text
    from kvq.evals.divergence import INSTRUMENT_FORMAT, check_windows
    from kvq.evals.figure import check_plot_path
    from kvq.evals.plot import write_plot
    from kvq.evals.report import write_report

    if plot_path is not None:
        check_plot_path(plot_path)
    if html_path is not None:
        require("--html", PLOTS)
    source = default_text() if text is None else read_text(text, text_field)
    for path in (json_path, plot_path, html_path):
        if path is not None:
            fileio.check_writable(path)
    checked = check_for(model_options, kv)
    check_windows(checked.prepared, source, context=context, max_windows=max_windows)
    if instrument:
        checked.prepared.recipe(INSTRUMENT_FORMAT)
    model = checked.load()
    measured = measure(
        model,
        checked.kv,
        source,
        json_path=json_path,
        refused=checked.refused,
        context=context,
        chunk=chunk,
        max_windows=max_windows,
        attention_window=attention_window,
        instrument=instrument,
    )
    if html_path:
        write_report(html_path, measured)
    if plot_path:
        write_plot(plot_path, measured)
    if instrument and not measured["instrument"]["passed"]:
        sys.exit(1)


def measure(
    model: "Model",
    kv: list[str],
    text: "EvalText | None" = None,
    *,
    json_path: str | None = None,
    refused: dict[str, str] | None = None,
    context: int = 1024,
    instrument: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Measure with a progress bar, print the table, write and return the JSON envelope."""
    from kvq.commands.finished import FinishedRows
    from kvq.commands.progress import progress_bar
    from kvq.commands.results import result_of
    from kvq.commands.tables import print_perplexity
    from kvq.evals import default_text, measure_perplexity
    from kvq.evals.perplexity import instrument_check
    from kvq.evals.results import source_commit

    text = text or default_text()
    source_commit()

    def result(rows: "Sequence[Any]") -> dict[str, Any]:
        more: dict[str, Any] = {"instrument": instrument_check(list(rows))} if instrument else {}
        return result_of(
            rows,
            model.weights.device,
            model=model.title,
            model_digest=model.weights.digest,
            text=text.name,
            text_digest=text.digest,
            context=context,
            refused=refused or {},
            **more,
        )

    with FinishedRows(json_path, result, print_perplexity) as finished:
        with progress_bar("measuring") as progress:
            rows = measure_perplexity(
                model,
                list(kv),
                text.text,
                context=context,
                instrument=instrument,
                progress=progress,
                keep=finished.keep,
                **options,
            )
        whole = result(rows)
        finished.finish(whole)
    print_perplexity(whole)
    return whole
