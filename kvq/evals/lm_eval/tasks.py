"""Runner of lm-eval's tasks that compares several KV formats of one model.

    from kvq.evals.lm_eval.tasks import LMEvalPlan, run_tasks

    model = kvq.load("Qwen/Qwen3-0.6B")
    engines = {kv: kvq.LLM(model, kv, kv_memory="2GiB") for kv in ("bf16", "int8", "int4")}
    for row in run_tasks(engines, ["hellaswag", "./my_task.yaml"], LMEvalPlan(limit=200)):
        print(row.kv, row.task, row.metric, row.value, row.stderr)

A task is the name of one of lm-eval's tasks, a pattern such as `mmlu_*`, the path of a YAML file, or the name
of a task in the folder `include_path`. Tasks with `dataset_path: json` and local `data_files` need no
network; as in lm-eval, relative data_files start at the current folder, not at the YAML file. A YAML file may
name Python functions (`!function`), which are run, so name only files you trust. Code that comes with
datasets is never run, nor are tasks that run code written by the model. Needs the extra `eval`.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from kvq.engine import LLM
from kvq.errors import KVQError, RequestError, first_lines
from kvq.evals.lm_eval.loading import LMEvalPlan, Loaded, load_tasks, quiet_bars
from kvq.evals.lm_eval.model import KvqLM
from kvq.evals.watch import UNWATCHED, Progress, Watch
from kvq.models import Model

_BOOTSTRAPS = 1000  # resamples, for metrics without a formula for the standard error


@dataclass(frozen=True, kw_only=True, slots=True)
class _TaskRow:
    """One metric of one task with one KV format. Fields are the JSON keys of `kvq eval`."""

    kv: str
    task: str  # lm-eval's name of the task or group
    metric: str
    filter: str  # applied to answers before they are scored; "none" if there is none
    value: float | None  # None if it is not a finite number
    stderr: float | None  # standard error, if there is one
    higher_is_better: bool | None
    samples: int
    seconds: float  # total for the requested task or group


def run_tasks(
    models: Mapping[str, LLM | KvqLM],
    tasks: Sequence[str],
    plan: LMEvalPlan | None = None,
    *,
    progress: Callable[[str, str, int, int], None] = lambda kv, task, done, total: None,
) -> list[_TaskRow]:
    """Return rows for every KV format, task and metric, in the order of tasks, then formats.

    `models`: engines keyed by the name of their format, or `KvqLM` instances with other options. All tasks
    are loaded before any task runs. `progress` is called with the format, the task, the number of finished
    requests, and the total number.

    Raises:
        RequestError: a task is unknown, broken or unreachable, or fails.
        ConfigError: an engine's options are unsuitable, or a library is too old.
    """
    if not models:
        raise RequestError("no KV format was named; try fp32,int8,int4")
    plan = plan or LMEvalPlan()
    lms = {kv: one if isinstance(one, KvqLM) else KvqLM(one, seed=plan.seed) for kv, one in models.items()}
    loaded = load_tasks(tasks, include_path=plan.include_path)
    return [
        row
        for one in loaded
        for kv, lm in lms.items()
        for row in run_loaded(lm, kv, one, plan, partial(progress, kv, one[0]))
    ]


def measure_tasks(
    models: Sequence[Model],
    loaded: Sequence[Loaded],
    plan: LMEvalPlan,
    *,
    kv_memory: int | str | None = None,
    watch: Watch = UNWATCHED,
) -> list[_TaskRow]:
    """Return rows for tasks from `load_tasks`, ordered by format, task and metric.

    Engines are built and closed one after another, so each engine can use all of the memory. `models`: one
    model per format. `kv_memory`: size of each pool; by default all free memory. If the first format is
    unquantized and gets nothing right in a task, the task is void and is not run in the other formats.

    Raises:
        RequestError: the tokenizer has no chat template, or a task fails.
        OutOfMemory: a pool doesn't fit.
    """
    rows: list[_TaskRow] = []
    void: set[str] = set()  # names of tasks
    for model in models:
        with LLM(model, kv_memory=kv_memory) as llm:
            lm = KvqLM(llm, seed=plan.seed)
            for one in loaded:
                if one[0] in void:
                    continue
                found = run_loaded(lm, model.recipe.name, one, plan, watch.progress)
                if model is models[0] and not model.recipe.is_quantized and _found_nothing(found):
                    void.add(one[0])
                rows += found
                watch.keep(rows.copy)
    return rows


def void_tasks(rows: Sequence[_TaskRow]) -> dict[str, str]:
    """Return the tasks whose results say nothing about formats, as {`lm_eval:NAME`: reason}."""
    by_task: dict[str, list[_TaskRow]] = {}
    for row in rows:
        by_task.setdefault(row.task, []).append(row)
    first = rows[0].kv if rows else ""
    return {
        f"lm_eval:{task}": f"{first} got nothing right in {own[0].samples} samples"
        for task, own in by_task.items()
        if {row.kv for row in own} == {first} and _found_nothing(own)
    }


def _found_nothing(rows: Sequence[_TaskRow]) -> bool:
    """Return True if there are figures for which higher is better, and all of them are 0."""
    values = [row.value for row in rows if row.higher_is_better]
    return bool(values) and not any(values)


def run_loaded(lm: KvqLM, kv: str, loaded: Loaded, plan: LMEvalPlan, progress: Progress) -> list[_TaskRow]:
    """Return the rows of one task or group in one format. Every format gets the same examples."""
    for task in loaded[1]["tasks"].values():  # as lm-eval's command does: a task's own 0 is kept
        own = task.get_config("num_fewshot")
        if own is None or (plan.num_fewshot is not None and own != 0):
            task.set_config(key="num_fewshot", value=plan.num_fewshot or 0)
        task.set_fewshot_seed(seed=plan.seed)
    lm.progress = progress
    began = time.perf_counter()
    results = _evaluate(lm, loaded, plan)
    return _rows(kv, results, time.perf_counter() - began)


def _evaluate(lm: KvqLM, loaded: Loaded, plan: LMEvalPlan) -> dict[str, Any]:
    """Return lm-eval's results for one task or group; raise RequestError if any part of it fails."""
    from lm_eval import evaluate

    name, spec = loaded
    try:  # lm-eval would fork this process to resample
        with quiet_bars(), patch.dict(os.environ, DISABLE_MULTIPROC="1"):
            results: dict[str, Any] = evaluate(
                lm,
                spec,
                limit=plan.limit,
                bootstrap_iters=_BOOTSTRAPS,
                log_samples=False,
                apply_chat_template=plan.apply_chat_template,
                fewshot_as_multiturn=plan.apply_chat_template,
            )
    except KVQError as error:
        raise RequestError(f"the task {name}: {error}") from error
    except Exception as error:  # a task's functions and metrics are third-party
        raise RequestError(f"the task {name} failed: {type(error).__name__}: {first_lines(error)}") from error
    return results


def _rows(kv: str, results: dict[str, Any], seconds: float) -> list[_TaskRow]:
    """Return a row per task and metric from lm-eval's results, which are keyed by "metric,filter"."""
    rows = []
    for task, values in results["results"].items():
        better = results.get("higher_is_better", {}).get(task, {})
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            rows.append(
                _TaskRow(
                    kv=kv,
                    task=task,
                    metric=metric,
                    filter=kind,
                    value=_finite(value),
                    stderr=_finite(error),
                    higher_is_better=better.get(metric),
                    samples=_samples(task, results),
                    seconds=seconds,
                )
            )
    return rows


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _samples(task: str, results: dict[str, Any]) -> int:
    """Return the number of samples in a task, or in all tasks of a group."""
    counts = results["n-samples"]
    if task in counts:
        return int(counts[task]["effective"])
    return sum(_samples(child, results) for child in results.get("group_subtasks", {}).get(task, []))
