"""`kvq eval`: what KV formats cost in quality, by several measures, with error bars and gates."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.eval_options import lm_eval_options, lm_eval_plan, needle_options, needle_plan
from kvq.commands.options import (
    ModelOptions,
    kv_option,
    model_argument,
    model_options,
    text_options,
    window_options,
)
from kvq.commands.screen import echo
from kvq.errors import ConfigError
from kvq.extras import PLOTS, require

if TYPE_CHECKING:
    from kvq.commands.eval_tasks import Chosen, EvalPlan
    from kvq.commands.loading import CheckedModel
    from kvq.evals.gates import Gate, GateFailure
    from kvq.models import Model

DEFAULT_KV = "fp32,fp8,int8,k8v4,int4"
_COUNT = click.IntRange(min=1)
_Make = Callable[[], dict[str, Any]]  # what is finished of a result


@click.command(name="eval")
@model_argument
@kv_option(DEFAULT_KV, many=True)
@click.option(
    "--tasks",
    default="perplexity,kl",
    show_default=True,
    help="Separated by commas: perplexity, kl, generation, attention, needle, and lm_eval:TASK, a task, a "
    "pattern or a YAML file of lm-eval.",
)
@text_options("held-out help topics of CPython")
@window_options
@click.option(
    "--instrument", is_flag=True, help="Also check that model and text can show damage; exit 1 if not."
)
@click.option(
    "--gate",
    "gates",
    multiple=True,
    metavar="EXPR",
    help="Exit 1 unless it holds: 'kl_mean<0.01', 'int4:perplexity_change_high<=1%', "
    "'needle.retrieved>=0.95' over the whole grid, 'lm_eval:TASK.acc>=0.6', 'lm_eval.acc_change>=-1%' "
    "against the baseline. May be repeated.",
)
@click.option("--prompts", type=_COUNT, default=32, show_default=True, help="Of generation.")
@click.option("--prompt-tokens", type=_COUNT, default=128, show_default=True, help="Per prompt.")
@click.option("--new-tokens", type=_COUNT, default=64, show_default=True, help="Generated after each.")
@click.option(
    "--attention-windows", type=_COUNT, default=8, show_default=True, help="Windows for the attention error."
)
@needle_options
@lm_eval_options
@click.option("--resamples", default=2000, show_default=True, help="Of documents, for 95% intervals.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of resampling and of needles."
)
@click.option("--json", "json_path", type=click.Path(), help="Write everything as JSON.")
@click.option(
    "--html", "html_path", type=click.Path(), help="Write a page that needs no other file, JSON beside it."
)
@model_options
def command(
    kv: list[str],
    model_options: ModelOptions,
    tasks: str,
    text: str | None,
    text_field: str | None,
    gates: tuple[str, ...],
    json_path: str | None,
    html_path: str | None,
    **options: Any,
) -> None:
    """Measure what KV formats cost in quality on MODEL, a folder, a hub name, or 'tiny'.

    Everything is against the first unquantized format listed, over tokens that go through kvq's own
    write-then-read path. Intervals are at 95%, from resampling documents.
    """
    from kvq.commands.eval_tables import print_check
    from kvq.commands.eval_tasks import choose_tasks
    from kvq.commands.loading import check_for
    from kvq.commands.results import begin
    from kvq.evals import default_text, read_text
    from kvq.evals.gates import parse_gate
    from kvq.evals.report import write_report

    chosen = choose_tasks(tasks)
    if html_path is not None:
        require("--html", PLOTS)
    limits = [parse_gate(gate) for gate in gates]
    if options["instrument"] and not any(one.task.key == "rows" for one in chosen):
        raise ConfigError("--instrument checks perplexity; add perplexity to --tasks")
    shared = _shared(options)
    source = default_text() if text is None else read_text(text, text_field)
    if html_path is not None:
        json_path = json_path or str(Path(html_path).with_suffix(".json"))
    begin(json_path, html_path)
    if (
        html_path is not None
        and json_path is not None
        and Path(html_path).resolve() == Path(json_path).resolve()
    ):
        raise ConfigError(f"--html and --json are both {html_path}; give the page another name")
    checked = check_for(model_options, kv)
    result = _measure(checked, chosen, limits, json_path, text=source, **shared)
    if html_path:
        write_report(html_path, result)
    if not print_check(result):
        sys.exit(1)


def _shared(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of `EvalPlan` from options."""
    from kvq.evals.bootstrap import Bootstrap
    from kvq.evals.generation import GenerationPlan

    names = [field.name for field in dataclasses.fields(GenerationPlan)]
    generation = GenerationPlan(**{name: options.pop(name) for name in names})
    needle = needle_plan(options)
    lm_eval = lm_eval_plan(options)
    bootstrap = Bootstrap(resamples=options.pop("resamples"), seed=options.pop("seed"))
    return {
        **options,
        "generation": generation,
        "needle": needle,
        "lm_eval": lm_eval,
        "bootstrap": bootstrap,
    }


def _measure(
    checked: "CheckedModel",
    chosen: "list[Chosen]",
    limits: "list[Gate]",
    json_path: str | None,
    **given: Any,
) -> dict[str, Any]:
    """Check everything, run the tasks one after another: the JSON envelope, written and shown."""
    from kvq.commands.eval_tables import print_eval
    from kvq.commands.eval_tasks import TASKS, gate_figures
    from kvq.commands.finished import FinishedRows
    from kvq.evals.gates import check_gate

    plan = plan_for(checked, **given)
    formats = {recipe.name: recipe.is_quantized for recipe in plan.recipes}
    if len(formats) < len(plan.recipes):
        raise ConfigError(f"--kv names a format twice: {', '.join(recipe.name for recipe in plan.recipes)}")
    prepared = [(one, one.task.prepare(plan, one.arguments)) for one in chosen]
    figures = gate_figures(prepared)
    about = [check_gate(gate, figures=figures, all_tasks=list(TASKS), formats=formats) for gate in limits]
    model, plan = load_for_plan(checked, plan)

    def result(found: "Sequence[dict[str, Any]]") -> dict[str, Any]:
        drawn = {"resamples": plan.bootstrap.resamples, "seed": plan.bootstrap.seed}
        return plan_result(model, plan, checked.refused, {"tasks": [], "gates": [], **drawn, **found[0]})

    with FinishedRows(json_path, result, print_eval) as finished:
        found, ran = run_all(prepared, plan, model, lambda make: finished.keep(lambda: [make()]))
        gates = [
            _gate_result(gate, _failures(gate, task, found, formats))
            for gate, task in zip(limits, about, strict=True)
        ]
        return finished.end([{**found, "tasks": ran, "gates": gates}])


def plan_for(checked: "CheckedModel", **given: Any) -> "EvalPlan":
    """A plan for the formats that were checked, the baseline first. `given`: other fields."""
    from kvq.commands.eval_tasks import EvalPlan
    from kvq.evals.divergence import baseline_first

    recipes = baseline_first([checked.recipe(name) for name in checked.kv], checked.prepared)
    return EvalPlan(prepared=checked.prepared, recipes=recipes, **given)


def load_for_plan(checked: "CheckedModel", plan: "EvalPlan") -> "tuple[Model, EvalPlan]":
    """The model, and the plan with the scales that loading may have calibrated."""
    model = checked.load()
    if checked.calibrates:
        recipes = [model.prepared.recipe(recipe, model.static_scales) for recipe in plan.recipes]
        plan = dataclasses.replace(plan, recipes=recipes)
    return model, plan


def plan_result(
    model: "Model", plan: "EvalPlan", refused: dict[str, str], found: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON envelope of what was found."""
    from kvq.commands.results import result_of
    from kvq.evals.perplexity import size_figures

    more = dict(found)
    rows = more.pop("rows", None) or [
        {"kv": recipe.name, **size_figures(model.with_kv(recipe))} for recipe in plan.recipes
    ]
    return result_of(
        rows,
        model.weights.device,
        model=model.title,
        model_digest=model.weights.digest,
        text=plan.text.name,
        text_digest=plan.text.digest,
        context=plan.context,
        refused=refused,
        **more,
    )


def _failures(
    gate: "Gate", task: str, found: Mapping[str, Any], formats: dict[str, bool]
) -> "list[GateFailure]":
    """What breaks a gate; a task that is void breaks all of its gates."""
    from kvq.commands.eval_tasks import TASKS
    from kvq.evals.gates import failures, missing

    for name, reason in found.get("void", {}).items():
        if name == task or name.startswith(f"{task}:"):
            return [missing(gate, f"{name} is void: {reason}")]
    return failures(gate, TASKS[task.partition(":")[0]].gate_rows(found, gate), formats)


def _gate_result(gate: "Gate", broken: "list[GateFailure]") -> dict[str, Any]:
    """How a gate ended, as JSON."""
    return {
        "gate": gate.text,
        "figure": gate.figure,
        "limit": gate.limit,
        "unit": gate.unit,
        "passed": not broken,
        "failures": [dataclasses.asdict(one) | {"told": one.told(gate)} for one in broken],
    }


def run_all(
    prepared: "list[tuple[Chosen, Any]]",
    plan: "EvalPlan",
    model: "Model",
    keep: Callable[[_Make], object],
    say: Callable[[str], object] = echo,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What all tasks measured, as JSON by key, and what each of them took."""
    from kvq.commands.eval_tasks import Running
    from kvq.commands.progress import progress_bar
    from kvq.commands.resources import measured

    found: dict[str, Any] = {}
    ran: list[dict[str, Any]] = []
    for one, given in prepared:
        names = ",".join(one.names)
        so_far = dict(found)
        tasks = [*ran, {"names": one.names, "key": one.task.key}]

        def keep_part(make: _Make, so_far: dict[str, Any] = so_far, tasks: list[Any] = tasks) -> None:
            keep(lambda: so_far | _as_json(make()) | {"tasks": tasks})

        with progress_bar(names) as progress, measured(model.weights.device) as used:
            running = Running(plan=plan, model=model, progress=progress, keep=keep_part)
            got = _as_json(one.task.run(running, given))
        void = found.get("void", {}) | got.pop("void", {})
        found |= got | ({"void": void} if void else {})
        ran.append({"names": one.names, "key": one.task.key, **dataclasses.asdict(used)})
        whole = found | {"tasks": list(ran)}
        keep(whole.copy)
        say(f"{names}: {used.line()}")
    return found, ran


def _as_json(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: [dataclasses.asdict(row) for row in value] if isinstance(value, list) else value
        for key, value in found.items()
    }
