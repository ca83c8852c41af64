"""Evaluation tasks of `kvq eval`, keyed by name. To add a task, add an entry to `TASKS`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

from kvq.commands.quality import eval_sessions
from kvq.commands.quality.eval_sessions import SessionOptions
from kvq.engine.build import check_cache
from kvq.errors import ConfigError, nearest
from kvq.evals import EvalText
from kvq.evals.attention_error import AttentionRow, measure_attention
from kvq.evals.divergence import INSTRUMENT_FORMAT, TokenPlan
from kvq.evals.exact_tail import check_exact
from kvq.evals.generation import GenerationPlan, GenerationRow, cut_prompts, measure_generation
from kvq.evals.lm_eval.loading import LMEvalPlan, load_tasks, task_metrics
from kvq.evals.needle import needle
from kvq.evals.needle.prompts import NeedlePlan, NeedlePrompts
from kvq.evals.perplexity import instrument_facts, look
from kvq.evals.quality import QualityRow, measure_quality
from kvq.evals.report.bootstrap import Bootstrap
from kvq.evals.report.gates import Gate, metric_figures, metric_rows
from kvq.evals.watch import Watch
from kvq.extras import LM_EVAL, SERVER, require
from kvq.formats import KVRecipe
from kvq.models import Model
from kvq.models.loading.prepared import PreparedModel
from kvq.traces.judging import FREE_FIGURES, TraceRow
from kvq.traces.tasks import TASKS as GENERATED

SESSION_TASKS = ("traces", *GENERATED)
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalPlan:
    """Plan for all evaluations in a run."""

    prepared: PreparedModel
    recipes: list[KVRecipe]  # starting with the baseline: an unquantized format, or the weights' dtype
    text: EvalText
    tokens: TokenPlan = field(default_factory=TokenPlan)
    attention_windows: int = 8  # number of windows for the attention error
    bootstrap: Bootstrap = field(default_factory=Bootstrap)
    generation: GenerationPlan = field(default_factory=GenerationPlan)
    needle: NeedlePlan = field(default_factory=NeedlePlan)
    lm_eval: LMEvalPlan = field(default_factory=LMEvalPlan)
    kv_memory: str | None = None  # size of the engines' pools
    sessions: SessionOptions = field(default_factory=SessionOptions)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Task:
    """One evaluation, which may have several names whose figures come from the same run."""

    key: str  # of its rows in the JSON
    prepare: Callable[[EvalPlan, list[str]], Any]  # raises before weights load; `run` receives its result
    # Returns keys of the JSON -> rows or JSON. The watch receives functions that return the finished rows.
    run: Callable[[EvalPlan, Model, Watch, Any], dict[str, Any]]
    figures: Callable[[str, Any], Mapping[str, Sequence[str]]]  # name, prepared -> figures for gates
    gate_rows: Callable[[Mapping[str, Any], Gate], Sequence[Row]]  # rows of the JSON that apply to a gate
    # Returns warnings about the result of `prepare`; raises if no query would see a quantized token.
    check_exact: Callable[[EvalPlan, Any], list[str]] = lambda plan, prepared: []
    takes_argument: bool = False  # NAME:ARGUMENT; all arguments of a task run together
    modules: tuple[str, ...] = ()  # modules that the task requires, from an extra


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chosen:
    """Task that will run, with the names and arguments that selected it."""

    names: list[str]
    task: _Task
    arguments: list[str]


def check_windows(plan: EvalPlan, _: object = None) -> None:
    """Raise RequestError or ConfigError if the windows or the instrument check are impossible."""
    plan.tokens.windows(plan.prepared, plan.text.text)
    if plan.tokens.instrument:
        plan.prepared.recipe(INSTRUMENT_FORMAT)


def _exact_in_generation(plan: EvalPlan, _: object) -> list[str]:
    options = plan.generation
    queries = range(options.prompt_tokens - 1, options.prompt_tokens + options.new_tokens - 1)
    advice = "give more --prompt-tokens, or fewer in +recent and +sinks"
    return check_exact(plan.prepared, plan.recipes, [queries], advice=advice)


def _exact_in_needles(plan: EvalPlan, found: tuple[NeedlePrompts, list[int]]) -> list[str]:
    queries = [range(length - 1, length) for length in found[1]]
    advice = "give longer --needle-lengths, or fewer tokens in +recent and +sinks"
    return check_exact(plan.prepared, plan.recipes, queries, advice=advice)


def _quality(plan: EvalPlan, model: Model, watch: Watch, _: object) -> dict[str, Any]:
    named = {recipe.name for recipe in plan.recipes}
    seen = look(model, plan.recipes[0], plan.text.text, plan.tokens)

    def result(rows: list[QualityRow]) -> dict[str, Any]:
        # Rows that only check the instrument are left out unless their format was requested
        kept = [row for row in rows if row.instrument != "window" and (not row.instrument or row.kv in named)]
        return {"rows": kept, **instrument_facts(rows, seen)}

    watch = watch.through(result)
    return result(measure_quality(model, plan.recipes, plan.text.text, plan.tokens, plan.bootstrap, watch))


def _generation(plan: EvalPlan, model: Model, watch: Watch, _: object) -> dict[str, Any]:
    watch = watch.through(lambda rows: {"generation": rows})
    given = plan.generation, plan.bootstrap, watch
    return {"generation": measure_generation(model, plan.recipes, plan.text.text, *given)}


def _attention(plan: EvalPlan, model: Model, watch: Watch, _: object) -> dict[str, Any]:
    watch = watch.through(lambda rows: {"attention": rows})
    most = plan.attention_windows
    tokens = replace(plan.tokens, max_windows=min(most, plan.tokens.max_windows or most))
    return {"attention": measure_attention(model, plan.recipes, plan.text.text, tokens, watch)}


def _needle(plan: EvalPlan, model: Model, watch: Watch, _: object) -> dict[str, Any]:
    def result(rows: list[needle.NeedleRow]) -> dict[str, Any]:
        reason = needle.void_reason(rows)
        return {
            "needle_summary": needle.summarize_needle(rows),
            "needle": rows,
            "needle_plan": asdict(plan.needle),
            "void": {} if reason is None else {"needle": reason},
        }

    given = plan.text.text, plan.needle, watch.through(result)
    return result(needle.measure_needle(model, plan.recipes, *given))


def _load_lm_eval(plan: EvalPlan, names: list[str]) -> list[Any]:
    check_cache(plan.prepared)
    if plan.lm_eval.apply_chat_template and not plan.prepared.tokenizer.chat_template:
        raise ConfigError("the model has no chat template; leave --apply-chat-template out")
    return load_tasks(names, include_path=plan.lm_eval.include_path)


def _lm_eval(plan: EvalPlan, model: Model, watch: Watch, loaded: list[Any]) -> dict[str, Any]:
    from kvq.evals.lm_eval.tasks import measure_tasks, void_tasks

    facts = {name: value for name, value in asdict(plan.lm_eval).items() if name != "include_path"}

    def result(rows: list[Any]) -> dict[str, Any]:
        return {"lm_eval": rows, "lm_eval_plan": facts, "void": void_tasks(rows)}

    models, watch = list(map(model.with_kv, plan.recipes)), watch.through(result)
    return result(measure_tasks(models, loaded, plan.lm_eval, kv_memory=plan.kv_memory, watch=watch))


def _lm_eval_figures(name: str, loaded: list[Any]) -> dict[str, list[str]]:
    """Return the metrics of all tasks under `name`, and of each task under `name:TASK`."""
    found = {f"{name}:{task}": metric_figures(names) for task, names in task_metrics(loaded).items()}
    every = dict.fromkeys(figure for figures in found.values() for figure in figures)
    return {name: list(every), **found}


def _of_rows(key: str, row: type) -> dict[str, Any]:
    """Return the gate functions of a task whose figures are its rows' numeric fields and interval bounds."""
    found = []
    for one in fields(row):
        if one.type in (int, float):
            found.append(one.name)
        elif one.name == "intervals" and isinstance(one.type, type) and is_dataclass(one.type):
            found += [f"{inner.name}_{end}" for inner in fields(one.type) for end in ("low", "high")]
    return {"figures": lambda name, _: {name: found}, "gate_rows": lambda done, _: done[key]}


def _of_sessions(name: str) -> _Task:
    """Return the task that replays recorded sessions or those of a generator."""

    def prepare(plan: EvalPlan, _: object) -> tuple[str, Any, bool]:
        check_cache(plan.prepared)
        options = plan.sessions
        return name, eval_sessions.load(name, options, plan.prepared, plan.bootstrap.seed), options.free

    def run(plan: EvalPlan, model: Model, watch: Watch, given: tuple[str, Any, bool]) -> dict[str, Any]:
        models = list(map(model.with_kv, plan.recipes))
        options = plan.sessions, plan.bootstrap
        return eval_sessions.run(models, given[:2], *options, kv_memory=plan.kv_memory, watch=watch)

    def figures(name: str, given: tuple[str, Any, bool]) -> dict[str, list[str]]:
        every: list[str] = rows["figures"](name, given)[name]
        return {name: [one for one in every if given[2] or one not in FREE_FIGURES]}

    rows = _of_rows(name, TraceRow)
    return _Task(key=name, prepare=prepare, run=run, modules=SERVER, **rows | {"figures": figures})


_WINDOWS: dict[str, Any] = {
    "prepare": check_windows,
    "check_exact": lambda plan, _: plan.tokens.check_exact(plan.prepared, plan.recipes),
}
_QUALITY = _Task(key="rows", run=_quality, **_WINDOWS, **_of_rows("rows", QualityRow))

TASKS: dict[str, _Task] = {
    "perplexity": _QUALITY,
    "kl": _QUALITY,
    "generation": _Task(
        key="generation",
        prepare=lambda plan, _: cut_prompts(plan.prepared, plan.text.text, plan.generation),
        check_exact=_exact_in_generation,
        run=_generation,
        **_of_rows("generation", GenerationRow),
    ),
    "attention": _Task(key="attention", run=_attention, **_WINDOWS, **_of_rows("attention", AttentionRow)),
    "needle": _Task(
        key="needle",
        prepare=lambda plan, _: needle.needle_prompts(plan.prepared, plan.text.text, plan.needle),
        check_exact=_exact_in_needles,
        run=_needle,
        **_of_rows("needle_summary", needle.NeedleSummary),
    ),
    "lm_eval": _Task(
        key="lm_eval",
        prepare=_load_lm_eval,
        run=_lm_eval,
        figures=_lm_eval_figures,
        gate_rows=lambda found, gate: metric_rows(found["lm_eval"], gate),
        takes_argument=True,
        modules=LM_EVAL,
    ),
    **{name: _of_sessions(name) for name in SESSION_TASKS},
}


def choose_tasks(names: str) -> list[Chosen]:
    """Parse a list such as `perplexity,kl,lm_eval:TASK`, and return each task once.

    Raises:
        ConfigError: a task is unknown, an argument is missing or superfluous, or packages are missing.
    """
    chosen: dict[int, Chosen] = {}
    for full in filter(None, map(str.strip, names.split(","))):
        name, colon, argument = full.partition(":")
        if name not in TASKS:
            hint = nearest(name, TASKS) or ";"
            raise ConfigError(f"there is no task {name!r}{hint} tasks are {', '.join(TASKS)}")
        task = TASKS[name]
        if task.takes_argument and not argument:
            raise ConfigError(f"the task {name} needs an argument, such as {name}:NAME")
        if colon and not task.takes_argument:
            raise ConfigError(f"the task {name} takes nothing after a colon, got {full!r}")
        require(full, task.modules)
        one = chosen.setdefault(id(task), Chosen(names=[], task=task, arguments=[]))
        if full not in one.names:
            one.names.append(full)
            one.arguments.extend(filter(None, [argument]))
    if not chosen:
        raise ConfigError(f"no task was named; tasks are {', '.join(TASKS)}")
    return list(chosen.values())


def gate_figures(prepared: Sequence[tuple[Chosen, Any]]) -> Mapping[str, Sequence[str]]:
    """Return the figures available to gates, keyed by the name of each task that will run.

    `prepared`: chosen tasks with the results of their `prepare` functions.
    """
    found: dict[str, Sequence[str]] = {}
    for name, task in TASKS.items():
        for one, given in prepared:
            if task is one.task:
                found |= task.figures(name, given)
    return found
