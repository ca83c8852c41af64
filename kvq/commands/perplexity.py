"""`kvq perplexity`: what KV formats save and what they cost."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.options import ModelOptions, kv_option, model_options, text_options

if TYPE_CHECKING:
    from kvq.evals import EvalText
    from kvq.models import Model

DEFAULT_KV = "fp32,bf16,fp8,int8,int4"


@click.command(name="perplexity")
@kv_option(DEFAULT_KV, many=True)
@model_options
@text_options("held-out help topics of CPython")
@click.option("--context", default=1024, show_default=True, help="Tokens per window.")
@click.option("--max-windows", type=int, help="Stop after this many windows.  [default: the whole text]")
@click.option("--chunk", type=int, help="Prefill tokens per step.  [default: as many as fit]")
@click.option(
    "--attention-window", type=int, help="Cut attention to this many tokens, to see what context is worth."
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
    from kvq.commands.loading import load_for
    from kvq.evals import default_text, read_text
    from kvq.evals.plot import check_plot_path, write_plot
    from kvq.evals.report import write_report
    from kvq.evals.results import write_json

    source = default_text() if text is None else read_text(text, text_field)
    for path in (json_path, plot_path, html_path):
        if path is not None:
            fileio.check_writable(path)
    if plot_path or html_path:
        check_plot_path(plot_path or "report.svg")
    model = load_for(model_options, kv)
    result = measure_and_print(
        model,
        model_options.model,
        kv,
        source,
        context=context,
        chunk=chunk,
        max_windows=max_windows,
        attention_window=attention_window,
        instrument=instrument,
    )
    if json_path:
        write_json(json_path, result)
    if plot_path:
        write_plot(plot_path, result)
    if html_path:
        write_report(html_path, result)
    if instrument and not result["instrument"]["passed"]:
        sys.exit(1)


def measure_and_print(
    model: "Model",
    name: str,
    kv: list[str],
    text: "EvalText | None" = None,
    *,
    context: int = 1024,
    instrument: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Measure with a progress bar, print the table, and return the JSON envelope."""
    from kvq.commands.progress import progress_bar
    from kvq.commands.tables import print_perplexity
    from kvq.evals import default_text, measure_perplexity
    from kvq.evals.perplexity import instrument_check
    from kvq.evals.results import envelope, source_commit

    text = text or default_text()
    source_commit()
    with progress_bar("measuring") as progress:
        rows = measure_perplexity(
            model, list(kv), text.text, context=context, instrument=instrument, progress=progress, **options
        )
    more: dict[str, Any] = {"instrument": instrument_check(rows)} if instrument else {}
    result = envelope(
        ["kvq", *sys.argv[1:]],
        model.weights.device,
        rows,
        model=f"{name if name == 'tiny' else Path(name).name} ({model.description})",
        model_digest=model.weights.digest,
        text=text.name,
        text_digest=text.digest,
        context=context,
        **more,
    )
    print_perplexity(result)
    return result
