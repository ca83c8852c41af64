"""The evaluations of `kvq eval` by name. A new one is an entry of `TASKS`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from kvq.errors import ConfigError, nearest
from kvq.evals import EvalText
from kvq.evals.attention_error import AttentionRow, measure_attention
from kvq.evals.bootstrap import Bootstrap
from kvq.evals.divergence import Progress, check_context
from kvq.evals.generation import GenerationPlan, GenerationRow, cut_prompts, measure_generation
from kvq.evals.perplexity import instrument_check
from kvq.evals.quality import QualityRow, measure_quality
from kvq.evals.windows import token_windows
from kvq.formats import KVRecipe
from kvq.models import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalPlan:
    """What every evaluation of a run is given."""

    model: Model
    kv: list[str | KVRecipe]  # the baseline is the first unquantized one, or the weights' own type
    text: EvalText
    context: int
    max_windows: int | None
    chunk: int | None
    instrument: bool
    attention_windows: int
    bootstrap: Bootstrap
    generation: GenerationPlan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """One evaluation. Several names may share one: what they measure comes from one run."""

    key: str  # of its rows in the JSON
    row: type  # dataclass of its rows; its numbers are what gates may name
    check: Callable[[EvalPlan, list[str]], object]  # raises before any task runs
    run: Callable[[EvalPlan, list[str], Progress], dict[str, Any]]  # keys of the JSON -> rows, JSON
    takes_argument: bool = False  # NAME:ARGUMENT; the arguments come together


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chosen:
    """A task that will run, by the names it was asked for, with their arguments."""

    names: list[str]
    task: Task
    arguments: list[str]


def _check_quality(plan: EvalPlan, _: list[str]) -> None:
    check_context(plan.model, plan.context)
    token_windows(plan.model.tokenizer, plan.text.text, context=plan.context, max_windows=plan.max_windows)


def _quality(plan: EvalPlan, _: list[str], progress: Progress) -> dict[str, Any]:
    rows = measure_quality(
        plan.model,
        plan.kv,
        plan.text.text,
        bootstrap=plan.bootstrap,
        context=plan.context,
        chunk=plan.chunk,
        max_windows=plan.max_windows,
        instrument=plan.instrument,
        progress=progress,
    )
    if not plan.instrument:
        return {"rows": rows}
    # The rows that were added to check the instrument say nothing about a format that was asked for.
    named = {plan.model.with_kv(kv).recipe.name for kv in plan.kv}
    kept = [row for row in rows if row.instrument != "window" and (not row.instrument or row.kv in named)]
    return {"rows": kept, "instrument": instrument_check(list(rows))}


def _generation(plan: EvalPlan, _: list[str], progress: Progress) -> dict[str, Any]:
    rows = measure_generation(
        plan.model,
        plan.kv,
        plan.text.text,
        plan=plan.generation,
        bootstrap=plan.bootstrap,
        progress=progress,
    )
    return {"generation": rows}


def _attention(plan: EvalPlan, _: list[str], progress: Progress) -> dict[str, Any]:
    rows = measure_attention(
        plan.model,
        plan.kv,
        plan.text.text,
        context=plan.context,
        max_windows=min(plan.attention_windows, plan.max_windows or plan.attention_windows),
        progress=progress,
    )
    return {"attention": rows}


_QUALITY = Task(key="rows", row=QualityRow, check=_check_quality, run=_quality)

TASKS: dict[str, Task] = {
    "perplexity": _QUALITY,
    "kl": _QUALITY,
    "generation": Task(
        key="generation",
        row=GenerationRow,
        check=lambda plan, _: cut_prompts(plan.model, plan.text.text, plan.generation),
        run=_generation,
    ),
    "attention": Task(key="attention", row=AttentionRow, check=_check_quality, run=_attention),
}


def choose_tasks(names: str) -> list[Chosen]:
    """Tasks from a list such as `perplexity,kl,lm_eval:TASK`, each to be run once.

    Raises:
        ConfigError: no such task, or an argument missing or too many.
    """
    chosen: dict[int, Chosen] = {}
    for full in filter(None, map(str.strip, names.split(","))):
        name, colon, argument = full.partition(":")
        if name not in TASKS:
            hint = nearest(name, list(TASKS)) or ";"
            raise ConfigError(f"there is no task {name!r}{hint} tasks are {', '.join(TASKS)}")
        task = TASKS[name]
        if task.takes_argument and not argument:
            raise ConfigError(f"the task {name} needs to be told what, such as {name}:NAME")
        if colon and not task.takes_argument:
            raise ConfigError(f"the task {name} takes nothing after a colon, got {full!r}")
        one = chosen.setdefault(id(task), Chosen(names=[], task=task, arguments=[]))
        if full not in one.names:
            one.names.append(full)
            one.arguments.extend(filter(None, [argument]))
    if not chosen:
        raise ConfigError(f"no task was named; tasks are {', '.join(TASKS)}")
    return list(chosen.values())


def gate_figures(chosen: Sequence[Chosen]) -> Mapping[str, Sequence[str]]:
    """What gates may name, per name of a task that will run."""
    names = {name for one in chosen for name, task in TASKS.items() if task is one.task}
    return {name: _numbers(TASKS[name].row) for name in TASKS if name in names}


def _numbers(row: type) -> list[str]:
    """The numeric fields of a row, and the bounds of its intervals."""
    found = []
    for field in fields(row):
        if field.type in (int, float):
            found.append(field.name)
        elif field.name == "intervals" and isinstance(field.type, type) and is_dataclass(field.type):
            found += [f"{inner.name}_{end}" for inner in fields(field.type) for end in ("low", "high")]
    return found
