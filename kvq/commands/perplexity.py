"""`kvq perplexity`: what KV formats save and what they cost."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.options import (
    ModelOptions,
    gathered,
    kv_option,
    model_options,
    text_options,
    window_options,
)
from kvq.extras import PLOTS, require

if TYPE_CHECKING:
    from kvq.commands.eval_tasks import EvalPlan
    from kvq.models import Model

DEFAULT_KV = "fp32,bf16,fp8,int8,int4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is measured, and where it is written."""

    text: str | None
    text_field: str | None
    context: int
    max_windows: int | None
    chunk: int | None
    attention_window: int | None
    instrument: bool
    json_path: str | None
    plot_path: str | None
    html_path: str | None

    def plan_fields(self) -> dict[str, Any]:
        """Fields of `EvalPlan`."""
        names = ("context", "max_windows", "chunk", "attention_window", "instrument")
        return {name: getattr(self, name) for name in names}


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
@gathered(Asked, "asked")
def command(kv: list[str], model_options: ModelOptions, asked: Asked) -> None:
    """Measure what KV formats cost on a text.

    Perplexity, KL divergence and top-1 agreement are against the first unquantized format listed,
    over tokens that go through kvq's own write-then-read path.
    """
    from kvq.commands.eval import load_for_plan, plan_for
    from kvq.commands.eval_tasks import PERPLEXITY
    from kvq.commands.loading import check_for
    from kvq.commands.results import begin
    from kvq.evals import default_text, read_text
    from kvq.evals.plot import write_plot
    from kvq.evals.report import write_report

    if asked.html_path is not None:
        require("--html", PLOTS)
    begin(asked.json_path, asked.html_path, plot=asked.plot_path)
    source = default_text() if asked.text is None else read_text(asked.text, asked.text_field)
    checked = check_for(model_options, kv)
    plan = plan_for(checked, text=source, **asked.plan_fields())
    PERPLEXITY.prepare(plan, [])
    result = measure(*load_for_plan(checked, plan), json_path=asked.json_path, refused=checked.refused)
    if asked.html_path:
        write_report(asked.html_path, result)
    if asked.plot_path:
        write_plot(asked.plot_path, result)
    if asked.instrument and not result["instrument"]["passed"]:
        sys.exit(1)


def measure(
    model: "Model", plan: "EvalPlan", *, json_path: str | None = None, refused: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run its one task as `kvq eval` runs tasks: the JSON envelope, which is written and shown."""
    from kvq.commands.eval import plan_result, run_all
    from kvq.commands.eval_tasks import PERPLEXITY, Chosen
    from kvq.commands.finished import FinishedRows
    from kvq.commands.tables import print_perplexity

    def result(found: "Sequence[dict[str, Any]]") -> dict[str, Any]:
        own = {name: value for name, value in found[0].items() if name != "tasks"}
        return plan_result(model, plan, refused or {}, own)

    task = Chosen(names=["measuring"], task=PERPLEXITY, arguments=[])
    with FinishedRows(json_path, result, print_perplexity) as finished:
        found, _ = run_all(
            [(task, None)],
            plan,
            model,
            lambda make: finished.keep(lambda: [make()]),
            say=lambda line: None,
        )
        return finished.end([found])
