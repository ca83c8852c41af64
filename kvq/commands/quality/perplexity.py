"""`kvq perplexity`: the memory that KV formats save, and the quality they cost."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.shared.declare import gathered, option, path_option
from kvq.commands.shared.options import ModelOptions, WindowOptions, kv_option, model_options, text_options
from kvq.commands.shared.param_types import TOKENS
from kvq.commands.shared.results import FinishedRows, begin
from kvq.commands.shared.terminal import print_check, print_eval, warn

if TYPE_CHECKING:
    from kvq.commands.quality.eval_tasks import EvalPlan
    from kvq.evals import PerplexityRow
    from kvq.models import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class _PerplexityOptions:
    text: str | None
    text_field: str | None
    attention_window: int | None = option(
        None, "Cut attention to this many tokens, to see how much the context helps.", type=TOKENS
    )
    json_path: str | None = path_option("--json", "Write the rows as JSON.")
    plot_path: str | None = path_option("--plot", "Write a plot (.svg, .png or .pdf).")
    html_path: str | None = path_option("--html", "Write a self-contained report.")


@click.command(name="perplexity")
@kv_option("fp32,bf16,fp8,int8,int4", many=True)
@model_options
@text_options("held-out help topics of CPython")
@gathered(WindowOptions, "windows")
@gathered(_PerplexityOptions, "options")
def command(
    kv: list[str], model_options: ModelOptions, windows: WindowOptions, options: _PerplexityOptions
) -> None:
    """Measure the quality of KV formats on a text.

    Perplexity, KL divergence and top-1 agreement are relative to the first unquantized format listed. All
    tokens go through kvq's own write-then-read path.
    """
    from kvq.commands.quality.eval import load_for_plan, recipes_of
    from kvq.commands.quality.eval_tasks import EvalPlan, check_windows
    from kvq.commands.shared.loading import check_for
    from kvq.evals import default_text, read_text
    from kvq.evals.divergence import TokenPlan
    from kvq.evals.report.figure import write_figure
    from kvq.evals.report.plot import perplexity_figure
    from kvq.evals.report.report import write_report

    begin(options.json_path, plot=options.plot_path, html=options.html_path)
    source = default_text() if options.text is None else read_text(options.text, options.text_field)
    checked = check_for(model_options, kv)
    plan = EvalPlan(
        prepared=checked.prepared,
        recipes=recipes_of(checked),
        text=source,
        tokens=TokenPlan(**asdict(windows), attention_window=options.attention_window),
    )
    check_windows(plan)
    for warning in plan.tokens.check_exact(plan.prepared, plan.recipes):
        warn(warning)
    result = measure(*load_for_plan(checked, plan), json_path=options.json_path, refused=checked.refused)
    if options.html_path:
        write_report(options.html_path, result)
    if options.plot_path:
        write_figure(options.plot_path, perplexity_figure, result)
    if not print_check(result):
        sys.exit(1)


def measure(  # D43: `kvq eval` with one measure and without intervals
    model: "Model", plan: "EvalPlan", *, json_path: str | None = None, refused: dict[str, str] | None = None
) -> dict[str, Any]:
    """Measure the perplexity of a plan's formats; write, show and return the JSON envelope."""
    from kvq.commands.quality.eval import plan_result
    from kvq.evals.perplexity import instrument_facts, look, measure_perplexity

    seen = look(model, plan.recipes[0], plan.text.text, plan.tokens)

    def result(rows: "Sequence[PerplexityRow]") -> dict[str, Any]:
        return plan_result(model, plan, refused or {}, {"rows": rows, **instrument_facts(rows, seen)})

    work = partial(measure_perplexity, model, plan.recipes, plan.text.text, plan.tokens)
    return FinishedRows(json_path, result, print_eval).measure("measuring", work)
