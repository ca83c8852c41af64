"""`kvq bench speculation`: what drafting is worth."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.shared.options import (
    FILE,
    SPECULATION,
    TO_WRITE,
    Finite,
    ModelOptions,
    Tokens,
    gathered,
    json_option,
    kv_option,
    model_options,
    option,
    picked,
)
from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvq.bench.speculation import Plan
    from kvq.models.loading.prepared import PreparedModel

_COLUMNS = {
    "kv": ("KV", ""),
    "name": ("k", ""),
    "acceptance": ("right", ".1%"),
    "offline_acceptance": ("offline", ".1%"),
    "tokens_per_step": ("tokens a step", ".2f"),
    "expected_tokens_per_step": ("expected", ".2f"),
    "output_tokens_per_s": ("output tok/s", ",.1f"),
    "output_tokens_per_s_p10": ("p10", ",.1f"),
    "output_tokens_per_s_p90": ("p90", ",.1f"),
    "speedup": ("faster", ".2f"),
    "expected_speedup": ("expected", ".2f"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationBenchOptions:
    """What is drafted how, for which requests."""

    speculation: str = option("ngram", SPECULATION)
    k: str = option("1,2,3,4,6", "Numbers of drafts that are tried, with commas between.")
    batch: int = option(1, "Requests at a time.", type=click.IntRange(1, 4096))
    requests: int = option(4, type=click.IntRange(1, 100_000))
    input_len: int = option(128, "Tokens of each prompt.", type=Tokens(1, 1 << 20))
    output_len: int = option(128, "Tokens generated for each.", type=Tokens(2, 1 << 20))
    temperature: float = option(0.0, "0 takes the likeliest token.", type=Finite(0, 10))
    seed: int | None = option(
        None, "Of requests, which then get the tokens that they get without drafts.", type=int
    )
    text: Path | None = option(
        None, "Prompts are cut from this text.  [default: help topics of Python]", type=FILE
    )
    repeats: int = option(5, type=click.IntRange(1, 1000))


@click.command(name="speculation")
@kv_option("auto", many=True)
@model_options
@gathered(SpeculationBenchOptions, "options")
@json_option
@click.option("--plot", "plot_path", type=TO_WRITE, help="Draw speed over k (.svg, .png).")
def speculation(
    kv: list[str],
    model_options: ModelOptions,
    options: SpeculationBenchOptions,
    json_path: str | None,
    plot_path: str | None,
) -> None:
    """Drafted tokens: how many are right, how many tokens a step gives, and how much faster that is.

    Every k, no drafts at all, and as many as the engine finds worth it run in turn in every repeat. Right: of
    drafts whose forerunners were right; offline: the same without drafting, found by comparing models
    over the text.
    """
    from kvq.bench.figures import speculation_figure
    from kvq.bench.speculation import bench_speculation, verdict
    from kvq.commands.shared.loading import check_for
    from kvq.commands.shared.progress import progress_bar
    from kvq.commands.shared.results import FinishedRows, begin, result_of
    from kvq.evals.report.figure import write_figure

    begin(json_path, plot=plot_path)
    checked = check_for(model_options, kv)
    plan = _plan(checked.prepared, options)
    model = checked.load()
    load = {name: value for name, value in asdict(options).items() if name != "text"}
    facts = {"model": model.description, "load": load, "refused": checked.refused}

    def whole(rows: "Sequence[Any]") -> dict[str, Any]:
        return result_of(rows, model.weights.device, facts | {"verdict": verdict(rows)})

    with FinishedRows(json_path, whole, _print) as finished:
        with progress_bar("drafting") as progress:
            rows = bench_speculation(model, checked.kv, plan, progress=progress, keep=finished.keep)
        result = finished.end(rows)
    if plot_path is not None:
        write_figure(plot_path, speculation_figure, result)


def _plan(model: "PreparedModel", options: SpeculationBenchOptions) -> "Plan":
    """Check the options and put them together."""
    from kvq.bench.speculation import Plan, check_depths
    from kvq.engine.build import check_cache
    from kvq.engine.speculation.make import check_speculation
    from kvq.engine.speculation_config import parse_speculation
    from kvq.evals.text import decoded, default_text
    from kvq.scheduler.depth import MOST_DRAFTS

    check_cache(model)
    how = parse_speculation(options.speculation)
    if how is None:
        raise ConfigError("--speculation says how tokens are drafted; off leaves nothing to measure")
    check_speculation(how, model)
    depths = check_depths(options.k, MOST_DRAFTS)
    text = default_text().text if options.text is None else decoded(options.text)
    ids = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < options.input_len:
        raise ConfigError(
            f"the text has {len(ids):,} tokens; prompts of --input-len {options.input_len:,} need more"
        )
    stride = options.input_len
    if options.requests * stride > len(ids):  # they overlap
        stride = max(1, (len(ids) - stride) // max(1, options.requests - 1))
    starts = [i * stride % (len(ids) - options.input_len + 1) for i in range(options.requests)]
    if options.input_len + options.output_len > model.max_context:
        raise ConfigError(
            f"{options.input_len:,} and {options.output_len:,} tokens are more than the model's context of "
            f"{model.max_context:,}; lower --input-len or --output-len"
        )
    return Plan(
        speculation=replace(how, k=max(depths)),
        depths=depths,
        prompts=[ids[start : start + options.input_len] for start in starts],
        batch=min(options.batch, options.requests),
        output_tokens=options.output_len,
        **picked(options, "temperature", "seed", "repeats"),
    )


def _print(result: dict[str, Any]) -> None:
    from kvq.commands.shared.tables import print_columns

    echo(f"model   {result['model']}")
    echo(f"device  {result['device']}")
    named = [row | {"name": "adapts" if row["adapts"] else str(row["k"] or "none")} for row in result["rows"]]
    print_columns(named, _COLUMNS)
    for line in result["verdict"]:
        echo(line)
