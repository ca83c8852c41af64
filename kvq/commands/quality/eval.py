"""`kvq eval`: quality of KV formats in several measures, with error bars and gates."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.quality.eval_sessions import SessionOptions
from kvq.commands.shared.declare import gathered, option, path_option, picked
from kvq.commands.shared.options import ModelOptions, WindowOptions, kv_option, model_options, text_options
from kvq.commands.shared.param_types import AT_LEAST_1, NATURAL, SIZE, TO_READ, TOKENS, Finite, Several
from kvq.commands.shared.progress import progress_bar
from kvq.commands.shared.results import FinishedRows, begin, json_beside, measured, result_of, used_line
from kvq.commands.shared.terminal import echo, print_check, print_eval, warn
from kvq.errors import ConfigError
from kvq.evals.watch import Keep, Watch
from kvq.formats import KVRecipe

if TYPE_CHECKING:
    from kvq.commands.quality.eval_tasks import Chosen, EvalPlan
    from kvq.commands.shared.loading import CheckedModel
    from kvq.evals import EvalText
    from kvq.evals.report.gates import Gate
    from kvq.models import Model

_JSON = ("cautions", "look")  # keys of results that are not lists of rows


@dataclass(frozen=True, kw_only=True, slots=True)
class _EvalOptions:
    """Options for tasks, gates, paths of results, and single tasks."""

    text: str | None
    text_field: str | None
    tasks: str | None = option(
        None,
        "Separated by commas: perplexity, kl, generation, attention, needle; traces, tools, calendar, files, "
        "arithmetic, lookup, edits, recall: agents' sessions; and lm_eval:TASK, a task, a pattern or a YAML "
        "file of lm-eval.  [default: perplexity,kl; traces with --traces]",
    )
    simulate: tuple[str, ...] = option(
        (),
        "Other projects' methods to measure, too, in a simulation: such as kivi-k2v2+recent=128,kvarn-k4v2; "
        "they can't be served.",
        type=Several(click.STRING, "name,..."),
    )
    gates: tuple[str, ...] = option(
        (),
        "Exit 1 unless it holds: 'kl_mean<0.01', 'int4:perplexity_change_high<=1%', "
        "'needle.retrieved>=0.95' over the whole grid, 'lm_eval:TASK.acc>=0.6', "
        "'lm_eval.acc_change>=-1%' against the baseline. May be repeated.",
        names="--gate",
        multiple=True,
    )
    attention_windows: int = option(8, "Windows for the attention error.", type=AT_LEAST_1)
    resamples: int = option(2000, "Resamples of documents, for 95% intervals.")
    seed: int = option(0, "Seed of resampling and of needles.", type=NATURAL)
    json_path: str | None = path_option("--json", "Write everything as JSON.")
    html_path: str | None = path_option("--html", "Write a self-contained page, and JSON beside it.")
    # Options of single tasks; those of lm_eval have lm-eval's names
    prompts: int = option(32, "Prompts of generation.", type=AT_LEAST_1)
    prompt_tokens: int = option(128, "Tokens of each prompt.", type=TOKENS)
    new_tokens: int = option(64, "Tokens generated after each prompt.", type=TOKENS)
    needle_lengths: tuple[int, ...] | None = option(
        None,
        "Tokens of prompt and answer.  [default: those of 512,1024,2048,4096 that model and text allow]",
        type=Several(TOKENS, "n,..."),
    )
    needle_depths: tuple[float, ...] = option(
        "0,0.25,0.5,0.75,1", "Shares of the text before the needle.", type=Several(Finite(0, 1), "x,...")
    )
    needle_trials: int = option(10, "Prompts per length and depth.", type=AT_LEAST_1)
    needle: str | None = option(
        None,
        "Sentence with {key} and {value}, or 'tokens' for random tokens.  [default: The secret number of "
        "{key} is {value}.]",
    )
    needle_distractors: int = option(0, "Further needles with other keys.", type=NATURAL)
    include_path: str | None = path_option(
        "--include-path", "Folder of more tasks for lm_eval.", type=TO_READ
    )
    limit: int | None = option(None, "Samples of each lm_eval task.  [default: all]", type=AT_LEAST_1)
    num_fewshot: int | None = option(
        None, "Examples before each question of lm_eval.  [default: the task's]", type=NATURAL
    )
    apply_chat_template: bool = option(False, "Ask lm_eval's questions as a chat.")
    kv_memory: str | None = option(
        None,
        "KV pool for lm_eval, such as 2GiB; one format at a time.  [default: from free memory]",
        type=SIZE,
    )


@click.command(name="eval")
@kv_option("fp32,fp8,int8,k8v4,int4", many=True)
@text_options("held-out help topics of CPython")
@gathered(_EvalOptions, "options")
@gathered(WindowOptions, "windows")
@gathered(SessionOptions, "sessions")
@model_options
def command(
    kv: list[str],
    model_options: ModelOptions,
    options: _EvalOptions,
    windows: WindowOptions,
    sessions: SessionOptions,
) -> None:
    """Measure the quality of KV formats on MODEL, a folder, a hub name, or 'tiny'.

    The baseline is the first unquantized format listed. All tokens go through kvq's own write-then-read path.
    Intervals are 95% intervals from resampling documents.
    """
    from kvq.commands.quality.eval_tasks import SESSION_TASKS, choose_tasks
    from kvq.commands.shared.loading import check_for
    from kvq.evals import default_text, read_text
    from kvq.evals.report.gates import parse_gate
    from kvq.evals.report.report import write_report

    json_path = json_beside(options.html_path, options.json_path)
    begin(json_path, html=options.html_path)
    chosen = choose_tasks(options.tasks or ("perplexity,kl" if sessions.traces is None else "traces"))
    limits = [parse_gate(gate) for gate in options.gates]
    if windows.instrument and not any(one.task.key == "rows" for one in chosen):
        raise ConfigError("--instrument checks perplexity; add perplexity to --tasks")
    if options.text is None and all(one.task.key in SESSION_TASKS for one in chosen):
        source = sessions.source([name for one in chosen for name in one.names], options.seed)
    else:
        source = default_text() if options.text is None else read_text(options.text, options.text_field)
    checked = check_for(model_options, kv)
    if options.simulate and (
        served := {"attention", "lm_eval", *SESSION_TASKS} & {one.task.key for one in chosen}
    ):
        raise ConfigError(f"--simulate is not for {' and '.join(sorted(served))}; leave one of them out")
    if options.simulate and checked.prepared.cache != "kvq":
        raise ConfigError(f"--simulate needs kvq's own blocks; leave out --cache {checked.prepared.cache}")
    plan = replace(_plan(checked, source, options, windows), sessions=sessions)
    result = _measure(checked, plan, chosen, limits, json_path)
    if options.html_path:
        write_report(options.html_path, result)
    if not print_check(result):
        sys.exit(1)


def _plan(
    checked: "CheckedModel", source: "EvalText", options: _EvalOptions, windows: WindowOptions
) -> "EvalPlan":
    from kvq.commands.quality.eval_tasks import EvalPlan
    from kvq.evals.divergence import TokenPlan
    from kvq.evals.generation import GenerationPlan
    from kvq.evals.lm_eval.loading import LMEvalPlan
    from kvq.evals.needle.prompts import SENTENCE, NeedlePlan
    from kvq.evals.report.bootstrap import Bootstrap
    from kvq.evals.simulated import simulated

    dims = checked.prepared.geometry.head_dims
    return EvalPlan(
        prepared=checked.prepared,
        recipes=[*recipes_of(checked), *(simulated(name, dims) for name in options.simulate)],
        text=source,
        tokens=TokenPlan(**asdict(windows)),
        attention_windows=options.attention_windows,
        bootstrap=Bootstrap(resamples=options.resamples, seed=options.seed),
        generation=GenerationPlan(**picked(options, "prompts", "prompt_tokens", "new_tokens")),
        needle=NeedlePlan(
            lengths=options.needle_lengths,
            depths=options.needle_depths,
            trials=options.needle_trials,
            needle=options.needle or SENTENCE,
            distractors=options.needle_distractors,
            seed=options.seed,
            **({} if windows.chunk is None else {"chunk": windows.chunk}),
        ),
        lm_eval=LMEvalPlan(**picked(options, "include_path", "limit", "num_fewshot", "apply_chat_template")),
        kv_memory=options.kv_memory,
    )


def _measure(
    checked: "CheckedModel",
    plan: "EvalPlan",
    chosen: "list[Chosen]",
    limits: "list[Gate]",
    json_path: str | None,
) -> dict[str, Any]:
    """Check all settings and run the tasks; write, show and return the JSON envelope."""
    from kvq.commands.quality.eval_tasks import TASKS, gate_figures
    from kvq.evals.report.gates import check_gate

    formats = {recipe.name: recipe.is_quantized for recipe in plan.recipes}
    if len(formats) < len(plan.recipes):
        raise ConfigError(f"--kv names a format twice: {', '.join(recipe.name for recipe in plan.recipes)}")
    prepared = [(one, one.task.prepare(plan, one.arguments)) for one in chosen]
    for warning in dict.fromkeys(w for one, given in prepared for w in one.task.check_exact(plan, given)):
        warn(warning)
    figures = gate_figures(prepared)
    about = [check_gate(gate, figures=figures, all_tasks=list(TASKS), formats=formats) for gate in limits]
    model, plan = load_for_plan(checked, plan)

    drawn = {"resamples": plan.bootstrap.resamples, "seed": plan.bootstrap.seed}

    def result(found: "Sequence[dict[str, Any]]") -> dict[str, Any]:
        return plan_result(model, plan, checked.refused, {"gates": [], **drawn, **found[0]})

    with FinishedRows(json_path, result, print_eval) as finished:
        found = _run_all(prepared, plan, model, lambda make: finished.keep(lambda: [make()]))
        gates = [_outcome(*one, found, formats) for one in zip(limits, about, strict=True)]
        return finished.end([{**found, "gates": gates}])


def recipes_of(checked: "CheckedModel") -> list[KVRecipe]:
    """Return the recipes of the formats that fit, starting with the baseline."""
    from kvq.evals.divergence import baseline_first

    return baseline_first([checked.recipe(name) for name in checked.kv], checked.prepared)


def load_for_plan(checked: "CheckedModel", plan: "EvalPlan") -> "tuple[Model, EvalPlan]":
    """Load the model, and return it with the plan, including any scales calibrated on loading."""
    model = checked.load()
    if checked.calibrates:
        recipes = [model.prepared.recipe(recipe, model.static_scales) for recipe in plan.recipes]
        plan = replace(plan, recipes=recipes)
    return model, plan


def plan_result(
    model: "Model", plan: "EvalPlan", refused: dict[str, str], found: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the JSON envelope of a plan's results."""
    from kvq.evals.perplexity import size_figures

    more = dict(found)
    rows = more.pop("rows", None) or [
        {"kv": recipe.name, **size_figures(model.with_kv(recipe), plan.tokens.context)}
        for recipe in plan.recipes
    ]
    about = {
        "model": model.title,
        "model_digest": model.weights.digest,
        "text": plan.text.name,
        "text_digest": plan.text.digest,
        "context": plan.tokens.context,
        "refused": refused,
    }
    return result_of(rows, model.weights.device, {"cautions": [], **about} | more)


def _outcome(gate: "Gate", task: str, found: Mapping[str, Any], formats: dict[str, bool]) -> dict[str, Any]:
    """Return the outcome of a gate as JSON; gates of a void task always fail."""
    from kvq.commands.quality.eval_tasks import TASKS
    from kvq.evals.report.gates import failures, missing

    broken = [
        missing(gate, f"{name} is void: {reason}")
        for name, reason in found.get("void", {}).items()
        if name == task or name.startswith(f"{task}:")
    ][:1] or failures(gate, TASKS[task.partition(":")[0]].gate_rows(found, gate), formats)
    return {
        "gate": gate.text,
        "figure": gate.figure,
        "limit": gate.limit,
        "unit": gate.unit,
        "passed": not broken,
        "failures": broken,
    }


def _run_all(
    prepared: "list[tuple[Chosen, Any]]", plan: "EvalPlan", model: "Model", keep: Keep
) -> dict[str, Any]:
    """Run all tasks, and return their results as JSON by key, with time and memory under `tasks`."""
    found: dict[str, Any] = {"tasks": []}
    for one, given in prepared:
        names = ",".join(one.names)
        task = {"names": one.names, "key": one.task.key}
        joined = partial(_joined, found, task)
        with progress_bar(names) as progress, measured(model.weights.device) as used:
            watch = Watch(progress, keep, warn).through(joined)
            got = one.task.run(plan, model, watch, given)
        found = _joined(found, task | used, got)
        keep(found.copy)
        echo(f"{names}: {used_line(used)}")
    return found


def _joined(found: dict[str, Any], task: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results so far, combined with the results of another task, as JSON."""
    rows = {
        key: [asdict(row) for row in value] if isinstance(value, list) and key not in _JSON else value
        for key, value in more.items()
    }
    void = found.get("void", {}) | rows.pop("void", {})
    return found | rows | {"tasks": [*found["tasks"], task]} | ({"void": void} if void else {})
