"""`kvq tune`: search for the recipe with the best quality within a memory budget."""

import sys
import time
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.shared.declare import gathered, option, path_option, picked
from kvq.commands.shared.options import ModelOptions, model_options, text_options
from kvq.commands.shared.param_types import AT_LEAST_1, POSITIVE, TO_READ, TO_WRITE, TOKENS, TokenCount
from kvq.commands.shared.progress import named_progress
from kvq.commands.shared.results import FinishedRows, begin, json_beside, result_of
from kvq.commands.shared.terminal import console, echo, print_cautions, print_columns, text_table, warn
from kvq.errors import ConfigError
from kvq.extras import SERVER, require
from kvq.formats import Code

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvq.calib.budget import TunePlan
    from kvq.calib.candidates import Trial
    from kvq.calib.search import Tuned
    from kvq.evals import EvalText
    from kvq.evals.side_by_side import Marked
    from kvq.models import Model
    from kvq.models.loading.prepared import PreparedModel

DEFAULT_BUDGET = "int4"
_TRIAL = {  # columns of trials in an unfinished search
    "layer": ("layer", "d"),
    "part": ("part", ""),
    "format": ("format", ""),
    "bytes_per_token": ("bytes / token", ",.4g"),
    "kl": ("KL alone", ".6f"),
}
_GENERATED, _LEAST_GENERATED = 24, 1000  # sessions, and their tokens
_MOST_SHARED = 0.1  # maximum share of the held-out text's long lines found in --text


@dataclass(frozen=True, kw_only=True, slots=True)
class _TuneOptions:
    text: str | None
    text_field: str | None
    budget: str | None = option(
        None,
        "Bits per element (4.5bits), bytes per token (900B), or a format's bytes.  "
        f"[default: {DEFAULT_BUDGET}]",
    )
    max_kl: float | None = option(None, "Limit of the mean KL divergence instead of --budget.", type=POSITIVE)
    objective: str = option(
        "text",
        "Spend bits where text is predicted, or where sessions of agents decide something: their calls, "
        "numbers, code and JSON.",
        type=click.Choice(("text", "traces")),
    )
    traces: str | None = path_option(
        "--traces",
        "Recorded sessions for --objective traces, as for kvq eval.  [default: generated ones]",
        type=TO_READ,
    )
    held_out: str | None = path_option(
        "--held-out",
        "Text to measure on.  [default: the last third of --text, or held-out help topics]",
        type=TO_READ,
    )
    formats: str | None = option(
        None, "Codes to choose from: int8,int6,int5,int4,int3,int2.  [default: those with fast kernels here]"
    )
    staged: bool = option(False, "Does nothing: recipes are staged wherever kvq's own cache serves.")
    recent: int = option(
        0, "Most recent tokens of a sequence to keep in bf16, far fewer than --context.", type=TokenCount()
    )
    sinks: int = option(0, "First tokens of a sequence to keep in bf16.", type=TokenCount())
    out: str = option("kvq.json", "Recipe to write.", type=TO_WRITE)
    context: int | None = option(None, "Tokens per window.  [default: 512 or the context]", type=TOKENS)
    max_windows: int = option(3, "Windows to search on.", type=AT_LEAST_1)
    verify_windows: int = option(8, "Windows to measure on.", type=AT_LEAST_1)
    costs: str | None = path_option("--costs", "--json of an earlier search, to reuse trials.", type=TO_READ)
    json_path: str | None = path_option("--json", "Write all measurements as JSON.")
    plot_path: str | None = path_option("--plot", "Write the Pareto front (.svg, .png or .pdf).")
    html_path: str | None = path_option("--html", "Write a self-contained page, and JSON beside it.")

    def plan(self, model: "PreparedModel", codes: "Sequence[Code] | None") -> "TunePlan":
        """Return the plan of the search. `codes`: None for all codes with fast kernels on this machine."""
        from kvq.calib.budget import TunePlan, default_codes, parse_budget

        is_limited = self.max_kl is not None and self.budget is None
        nbytes = None if is_limited else parse_budget(model, self.budget or DEFAULT_BUDGET)
        same = ("max_kl", "recent", "sinks", "context", "max_windows", "verify_windows")
        plan = TunePlan(budget_bytes=nbytes, **picked(self, *same))
        if self.objective == "traces":
            searched, unseen = _marked(model, plan.tokens_per_window(model), self.traces)
            plan = replace(plan, marked=searched, unseen=unseen)
        elif self.traces is not None:
            raise ConfigError("--traces is for --objective traces")
        if codes is not None:
            return replace(plan, codes=codes)
        plan = replace(plan, codes=default_codes(model, plan))
        _say_codes(model, plan)
        return plan


@click.command(name="tune")
@text_options("help topics of CPython that are not held out")
@gathered(_TuneOptions, "options")
@model_options
def command(model_options: ModelOptions, options: _TuneOptions) -> None:
    """Find formats for K and V of every layer of MODEL within a budget, and write a kvq.json.

    K and V of each layer are quantized separately in one or two formats, and the divergence is measured; the
    divergence of other formats is estimated from these measurements. The best recipe within the budget is
    then compared with uniform formats on text that the search did not see, and for --objective traces on
    the last third of the sessions. `--kv kvq.json` serves this recipe.
    """
    from kvq.calib.candidates import ALL_CODES, codes_of
    from kvq.calib.tune_report import front_figure, write_report
    from kvq.commands.shared.loading import check_for
    from kvq.evals.report.figure import write_figure
    from kvq.models.check.verdict import verdict

    json_path = json_beside(options.html_path, options.json_path)
    begin(options.out, json_path, plot=options.plot_path, html=options.html_path)
    codes = None if options.formats is None else codes_of(options.formats.split(","))
    texts = _texts(options.text, options.text_field, options.held_out)
    checked = check_for(model_options, ["auto"])
    plan = options.plan(checked.prepared, codes)
    for warning in plan.check_exact(checked.prepared, plan.check(checked.prepared, *texts)):
        warn(warning)
    tuned, result = _tune(checked.load(), texts, plan, options, json_path)
    _print(result, options.out)
    if options.html_path:
        write_report(options.html_path, result)
    if options.plot_path:
        write_figure(options.plot_path, front_figure, result["rows"])
    chosen = tuned.chosen
    if verdict(chosen.kl_mean, chosen.perplexity_change) != "harmless" and len(plan.codes) < len(ALL_CODES):
        echo(
            "that is a lot of damage: a few layers may need 8 bits, if others take 2 for it; "
            f"try --formats {','.join(code.name for code in ALL_CODES)}"
        )
    if options.max_kl is not None and chosen.kl_mean > options.max_kl:
        echo(
            f"on {texts[1].name}, which the search did not see, the mean KL is {chosen.kl_mean:.3g}, "
            f"above --max-kl {options.max_kl:g}; search on more text (--max-windows), or ask for less"
        )
        sys.exit(1)


def _tune(
    model: "Model",
    texts: "tuple[EvalText, EvalText]",
    plan: "TunePlan",
    options: _TuneOptions,
    json_path: str | None,
) -> "tuple[Tuned, dict[str, Any]]":
    from kvq.calib.search import tune
    from kvq.calib.tune_report import point_rows, read_trials, sensitivity_rows, tuned_facts
    from kvq.weights.manifest import relist

    source, other = texts
    window = plan.windows(model.prepared, source.text, 1)[0]
    same: dict[str, Any] = {"model_digest": model.weights.digest, "text_digest": source.digest}
    same |= {"context": len(window), "exact": str(plan.exact)}
    if plan.marked:
        same["text_digest"] = sha256(repr(plan.marked).encode()).hexdigest()
    if options.costs is not None:
        plan = replace(plan, known=read_trials(options.costs, model, same))
    about = same | {
        "model": model.title,
        "text": options.traces or "generated sessions" if plan.marked else source.name,
        "held_out": other.name,
        "held_out_digest": other.digest,
    }
    began = time.perf_counter()

    def unfinished(trials: "Sequence[Trial]") -> dict[str, Any]:
        return result_of([], model.weights.device, about | {"sensitivities": sensitivity_rows(trials)})

    with FinishedRows(
        json_path, unfinished, lambda result: print_columns(result["sensitivities"], _TRIAL)
    ) as finished:
        with named_progress() as progress:
            tuned = tune(model, source, other, plan, progress=progress, keep=finished.keep)
            tuned = replace(tuned, recipe=replace(tuned.recipe, measured_on=_measured_on(tuned, about)))
        tuned.recipe.save(options.out)
        relist(options.out)
        facts = tuned_facts(model, tuned) | about | {"seconds": time.perf_counter() - began}
        result = result_of(point_rows(tuned), model.weights.device, facts)
        finished.finish(result)
    return tuned, result


def _measured_on(tuned: "Tuned", about: "Mapping[str, Any]") -> str:
    return (
        f"searched on {about['text']}: KL {tuned.search_kl:.3g}; measured on {about['held_out']}: "
        f"KL {tuned.chosen.kl_mean:.3g}"
    )


def _marked(
    model: "PreparedModel", context: int, path: str | None
) -> "tuple[Sequence[Marked], Sequence[Marked]]":
    """Return the windows of sessions to search on, and those of other sessions to measure on."""
    require("--objective traces", SERVER)
    from kvq.traces.marking import marked_windows
    from kvq.traces.reading import read_log
    from kvq.traces.tasks import generated

    tokens = max(_LEAST_GENERATED, 2 * context)
    if path is None:
        sessions = generated("tools", _GENERATED + _GENERATED // 2, 1, tokens=tokens)
    else:
        sessions = read_log(Path(path)).sessions
    cut = 2 * len(sessions) // 3  # as text is held out
    if not cut:
        raise ConfigError(f"--traces {path} has 1 session; a search needs another one to measure on")
    return marked_windows(model, sessions[:cut], context), marked_windows(model, sessions[cut:], context)


def _texts(text: str | None, field: str | None, held_out: str | None) -> "tuple[EvalText, EvalText]":
    """Return the text used in the search and a separate text for measurement."""
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


def _say_codes(model: "PreparedModel", plan: "TunePlan") -> None:
    from kvq.calib.budget import slow_codes

    if slow := slow_codes(model, plan.codes):
        echo(
            f"kvq: {', '.join(code.name for code in slow)} has no fast kernel here: its layers are "
            f"read by the slow reference kernel. --formats chooses others.",
            err=True,
        )


def _print(result: dict[str, Any], out: str) -> None:
    from kvq.calib.tune_report import RECIPE, marked, point_columns

    print_cautions(result)
    out_console = console()
    out_console.print(text_table(RECIPE, result["recipe"], RECIPE))
    out_console.print(f"\non {result['held_out']}; * is on the front: nothing smaller is better")
    print_columns(marked(result["rows"]), point_columns(result["rows"]))
    echo(f"\nwrote {out} in {result['seconds']:,.0f} s: {result['verdict']}")
