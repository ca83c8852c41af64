"""`kvq bench speculation`: acceptance and speedup of drafted tokens."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.shared.declare import gathered, option, picked
from kvq.commands.shared.options import SPECULATION, ModelOptions, json_option, kv_option, model_options
from kvq.commands.shared.param_types import FILE, TO_WRITE, Finite, TokenCount
from kvq.commands.shared.results import FinishedRows, begin, result_of
from kvq.commands.shared.terminal import echo, print_columns, print_origin
from kvq.errors import ConfigError
from kvq.evals.report.page import columns_of

if TYPE_CHECKING:
    from kvq.bench.speculation import SpeculationPlan
    from kvq.models.loading.prepared import PreparedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class _SpeculationOptions:
    speculation: str = option("ngram", SPECULATION)
    k: str = option("1,2,3,4,6", "Numbers of drafts to try, with commas between.")
    batch: int = option(1, "Requests at a time.", type=click.IntRange(1, 4096))
    requests: int = option(4, type=click.IntRange(1, 100_000))
    input_len: int = option(128, "Tokens of each prompt.", type=TokenCount(1, 1 << 20))
    output_len: int = option(128, "Tokens generated for each.", type=TokenCount(2, 1 << 20))
    temperature: float = option(0.0, "0 takes the likeliest token.", type=Finite(0, 10))
    seed: int | None = option(None, "Seed of requests; makes their tokens the same without drafts.", type=int)
    text: Path | None = option(None, "Text to cut prompts from.  [default: help topics of Python]", type=FILE)
    repeats: int = option(5, type=click.IntRange(1, 1000))


@click.command(name="speculation")
@kv_option("auto", many=True)
@model_options
@gathered(_SpeculationOptions, "options")
@json_option
@click.option("--plot", "plot_path", type=TO_WRITE, help="Draw speed over k (.svg, .png).")
def speculation(
    kv: list[str],
    model_options: ModelOptions,
    options: _SpeculationOptions,
    json_path: str | None,
    plot_path: str | None,
) -> None:
    """Measure the acceptance of drafted tokens, the tokens per step, and the speedup.

    Every repeat runs each k, no drafts, and a k that the engine adapts, one after another. Right is the share
    of correct drafts among the drafts whose predecessors were correct; offline is the same share without
    drafting, from comparing the models' predictions on the text.
    """
    from kvq.bench.figures import speculation_figure
    from kvq.bench.speculation import bench_speculation, verdict
    from kvq.commands.shared.loading import check_for
    from kvq.evals.report.figure import write_figure

    begin(json_path, plot=plot_path)
    checked = check_for(model_options, kv)
    plan = _plan(checked.prepared, options)
    model = checked.load()
    load = {name: value for name, value in asdict(options).items() if name != "text"}
    facts = {"model": model.description, "load": load, "refused": checked.refused}

    def whole(rows: Sequence[Any]) -> dict[str, Any]:
        return result_of(rows, model.weights.device, facts | {"verdict": verdict(rows)})

    finished = FinishedRows(json_path, whole, _print)
    result = finished.measure("drafting", partial(bench_speculation, model, checked.kv, plan))
    if plot_path is not None:
        write_figure(plot_path, speculation_figure, result)


def _plan(model: "PreparedModel", options: _SpeculationOptions) -> "SpeculationPlan":
    from kvq.bench.speculation import SpeculationPlan, check_depths
    from kvq.engine.build import check_cache
    from kvq.engine.speculation.make import check_speculation
    from kvq.engine.speculation_config import parse_speculation
    from kvq.evals.text import decoded, default_text
    from kvq.scheduler.draft_depth import MOST_DRAFTS

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
    if options.requests * stride > len(ids):  # prompts overlap
        stride = max(1, (len(ids) - stride) // max(1, options.requests - 1))
    starts = [i * stride % (len(ids) - options.input_len + 1) for i in range(options.requests)]
    if options.input_len + options.output_len > model.max_context:
        raise ConfigError(
            f"{options.input_len:,} and {options.output_len:,} tokens are more than the model's context of "
            f"{model.max_context:,}; lower --input-len or --output-len"
        )
    return SpeculationPlan(
        speculation=replace(how, k=max(depths)),
        depths=depths,
        prompts=[ids[start : start + options.input_len] for start in starts],
        batch=min(options.batch, options.requests),
        output_tokens=options.output_len,
        **picked(options, "temperature", "seed", "repeats"),
    )


def _print(result: dict[str, Any]) -> None:
    print_origin(result)
    named = [row | {"name": "adapts" if row["adapts"] else str(row["k"] or "none")} for row in result["rows"]]
    print_columns(named, columns_of("bench speculation"))
    for line in result["verdict"]:
        echo(line)
