"""lm-eval's tasks for several KV formats of one model, side by side.

    from kvq.evals.lm_eval_tasks import run_tasks

    model = kvq.load("Qwen/Qwen3-0.6B")
    engines = {kv: kvq.LLM(model, kv, kv_memory="2GiB") for kv in ("bf16", "int8", "int4")}
    for row in run_tasks(engines, ["hellaswag", "./my_task.yaml"], limit=200):
        print(row.kv, row.task, row.metric, row.value, row.stderr)

A task is a name that lm-eval knows, a pattern such as `mmlu_*`, the path of a YAML file, or a name from a
folder given as `include_path`. Those with `dataset_path: json` and `data_files` of their own need no
network; as in lm-eval, relative data_files start at the current folder, not at the YAML file. A YAML file
may name Python functions (`!function`): they run, so name only files you trust. What datasets bring along
as code never runs, nor do tasks that run what the model wrote. Needs pip install 'kvq-toolkit[eval]'.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

from kvq.engine import LLM
from kvq.errors import ConfigError, KVQError, RequestError, first_lines, nearest
from kvq.evals.lm_eval_model import KvqLM
from kvq.models import Model

_BOOTSTRAPS = 1000  # resamples, of metrics whose standard error has no formula
_SUFFIXES = (".yaml", ".yml")

Progress = Callable[[str, str, int, int], object]  # (kv, task, requests done, requests in all)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRow:
    """One metric of one task over one KV format. Fields are the JSON keys of `kvq eval`."""

    kv: str
    task: str  # lm-eval's name; of a group, or of one of its tasks
    metric: str
    filter: str  # what was done to answers before they were judged; "none" for nothing
    value: float | None  # None: it is not a finite number
    stderr: float | None  # standard error, where there is one
    higher_is_better: bool | None
    samples: int
    seconds: float  # of all that was run for the task that was asked for


Loaded = tuple[str, dict[str, Any]]  # what was asked for, what lm-eval's TaskManager makes of it


@dataclass(frozen=True, kw_only=True, slots=True)
class LMEvalPlan:
    """How tasks are run: options of `run_tasks` by name."""

    include_path: str | Path | None = None
    limit: int | None = None  # samples of each task
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    seed: int = 1234  # lm-eval's own

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise RequestError(f"limit must be at least 1 sample, got {self.limit}")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise RequestError(f"num_fewshot must be at least 0, got {self.num_fewshot}")


def run_tasks(
    models: Mapping[str, LLM],
    tasks: Sequence[str],
    *,
    include_path: str | Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    seed: int = 1234,
    progress: Progress = lambda kv, task, done, total: None,
    **options: Any,
) -> list[TaskRow]:
    """Rows for every KV format, task and metric, in the order of tasks, then formats.

    `models`: engines by the name of their format. `include_path`: a folder with more task files.
    `limit`: samples of each task, the first ones. `num_fewshot`: examples before each question, where
    a task does not fix them. `seed`: of examples and of tasks that sample. `options`: those of `KvqLM`.

    All tasks are loaded before any is run.

    Raises:
        RequestError: a task that is unknown, broken, out of reach, or fails.
        ConfigError: an engine's option that can't be used as given, or libraries too old.
    """
    if not models:
        raise RequestError("no KV format was named; try fp32,int8,int4")
    plan = LMEvalPlan(
        include_path=include_path,
        limit=limit,
        num_fewshot=num_fewshot,
        apply_chat_template=apply_chat_template,
        seed=seed,
    )
    lms = {kv: KvqLM(llm, seed=seed, **options) for kv, llm in models.items()}
    rows: list[TaskRow] = []
    for one in load_tasks(tasks, include_path=include_path):
        for kv, lm in lms.items():
            rows += run_loaded(lm, kv, one, plan, progress=progress)
    return rows


def measure_tasks(
    models: Sequence[Model],
    loaded: Sequence[Loaded],
    plan: LMEvalPlan,
    *,
    kv_memory: int | str | None = None,
    progress: Progress = lambda kv, task, done, total: None,
) -> list[TaskRow]:
    """Rows of tasks that `load_tasks` returned, for every format, task and metric in this order.

    Engines are built and closed one after another, so that each has the memory to itself. `models`: one
    per format. `kv_memory`: of each pool; what is free if None.

    Raises:
        RequestError: the tokenizer has no chat template, or a task fails.
        OutOfMemory: a pool doesn't fit.
    """
    rows: list[TaskRow] = []
    for model in models:
        with LLM(model, kv_memory=kv_memory) as llm:
            lm = KvqLM(llm, seed=plan.seed)
            for one in loaded:
                rows += run_loaded(lm, model.recipe.name, one, plan, progress=progress)
    return rows


def run_loaded(lm: KvqLM, kv: str, loaded: Loaded, plan: LMEvalPlan, *, progress: Progress) -> list[TaskRow]:
    """Rows of one task, or group, over one format. Examples are drawn anew, the same for every format."""
    name, spec = loaded
    _set_fewshot(spec, plan.num_fewshot, plan.seed)
    lm.progress = lambda done, total: progress(kv, name, done, total)
    began = time.perf_counter()
    results = _evaluate(lm, name, spec, plan.limit, plan.apply_chat_template)
    return _rows(kv, results, time.perf_counter() - began)


def task_metrics(loaded: Sequence[Loaded]) -> dict[str, list[str]]:
    """What is measured, per name of a task or a group among those loaded."""
    found: dict[str, list[str]] = {}
    for _, spec in loaded:
        for name, group in spec.get("groups", {}).items():
            metrics = [one.metric for one in group.aggregate_metric_list or []]
            if metrics:
                found[name] = list(dict.fromkeys(metrics))
        for name, task in spec["tasks"].items():
            found[name] = list(task.aggregation())
    return found


def load_tasks(tasks: Sequence[str], *, include_path: str | Path | None = None) -> list[Loaded]:
    """Find each of `tasks`, and read its data.

    Raises:
        RequestError: unknown, broken, or its data can't be read.
    """
    from lm_eval.tasks import TaskManager

    if isinstance(tasks, str) or not tasks:
        raise RequestError(f"tasks must be a list of at least one task, got {tasks!r}")
    if include_path is not None and not Path(include_path).is_dir():
        raise RequestError(f"include_path must be a folder with task files, got {str(include_path)!r}")
    alone = include_path is None and all(_is_file(task) and not _is_group(task) for task in tasks)
    with _quiet_datasets(), _quiet_bars():
        try:
            manager = TaskManager(
                include_path=None if include_path is None else str(include_path), include_defaults=not alone
            )
        except Exception as error:  # whatever lm-eval makes of a folder's files
            raise RequestError(f"the tasks can't be listed: {first_lines(error)}") from error
        return [(name, _load(manager, name)) for task in tasks for name in _names(manager, task)]


@contextmanager
def _quiet_bars() -> Iterator[None]:
    """No bars of lm-eval's, which can't be told; what it and its tasks print goes to standard error."""
    from tqdm import tqdm

    shown = tqdm.__init__
    tqdm.__init__ = partialmethod(shown, disable=True)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        tqdm.__init__ = shown


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """No code from datasets, and no bars from them either."""
    import datasets

    if int(datasets.__version__.split(".")[0]) < 4:
        raise ConfigError(
            f"datasets {datasets.__version__} may run code that a dataset brings; pip install 'datasets>=4'"
        )
    were_shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if were_shown:
            datasets.enable_progress_bars()


def _is_file(task: str) -> bool:
    return task.endswith(_SUFFIXES)


def _is_group(path: str) -> bool:
    """True if a file may name tasks of lm-eval's own, which takes seconds to list."""
    try:
        lines = Path(path).expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    return any(line.startswith("group:") for line in lines)


def _names(manager: Any, task: str) -> list[str]:
    """The names or the file that a task means.

    Raises:
        RequestError: there is none.
    """
    if _is_file(task):
        if not Path(task).expanduser().is_file():
            raise RequestError(f"there is no task file {task}")
        return [task]
    if Path(task).is_dir() and task not in manager.all_tasks:
        raise RequestError(f"{task} is a folder; give it as include_path, and name one of its tasks")
    names: list[str] = manager.match_tasks([task]) if any(c in task for c in "*?[") else [task]
    if not names or names[0] not in manager.all_tasks:
        raise RequestError(
            f"lm-eval has no task {task!r}{nearest(task, manager.all_tasks) or ';'} `lm-eval ls tasks` lists "
            f"them, and files that can't be read are left out: name the file to see why"
        )
    return names


def _load(manager: Any, name: str) -> dict[str, Any]:
    """Build a task or a group, which reads its data."""
    try:
        loaded: dict[str, Any] = manager.load([name])
    except Exception as error:  # a task's file, its functions and its data are others' work
        raise RequestError(f"the task {name} can't be loaded: {_reason(error)}") from error
    for task_name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise RequestError(f"the task {task_name} runs code that the model wrote, which kvq never does")
    if not loaded["tasks"]:
        raise RequestError(f"the task {name} is an empty group; nothing can be run")
    return loaded


def _reason(error: Exception) -> str:
    """What went wrong on one line, and what to do about it."""
    text = first_lines(error)
    if isinstance(error, ConnectionError | TimeoutError):
        return (
            f"{text}; its data lies on the Hugging Face Hub, which can't be reached. Load it once with a "
            f"network, or give a task file with `dataset_path: json` and data_files of your own"
        )
    if isinstance(error, FileNotFoundError):
        return f"{text}; relative data_files start at the current folder, {Path.cwd()}"
    return f"{type(error).__name__}: {text}"


def _set_fewshot(loaded: Mapping[str, Any], num_fewshot: int | None, seed: int) -> None:
    """Set the examples before each question, as lm-eval's command does: a task's own 0 stays."""
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (num_fewshot is not None and own != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=seed)


def _evaluate(
    lm: KvqLM, name: str, loaded: dict[str, Any], limit: int | None, apply_chat_template: bool
) -> dict[str, Any]:
    """lm-eval's results of one task or group.

    Raises:
        RequestError: the model can't serve a request of it, or its own code fails.
    """
    from lm_eval import evaluate

    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval would fork this process to resample
    try:
        with _quiet_bars():
            results: dict[str, Any] = evaluate(
                lm,
                loaded,
                limit=limit,
                bootstrap_iters=_BOOTSTRAPS,
                log_samples=False,
                apply_chat_template=apply_chat_template,
                fewshot_as_multiturn=apply_chat_template,
            )
    except KVQError as error:
        raise RequestError(f"the task {name}: {error}") from error
    except Exception as error:  # a task's functions and metrics are others' work
        raise RequestError(f"the task {name} failed: {type(error).__name__}: {first_lines(error)}") from error
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
    return results


def _rows(kv: str, results: dict[str, Any], seconds: float) -> list[TaskRow]:
    """One row per task and metric of lm-eval's results, whose keys are "metric,filter"."""
    rows = []
    for task, values in results["results"].items():
        better = results.get("higher_is_better", {}).get(task, {})
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            rows.append(
                TaskRow(
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
    """Samples of a task, or of all tasks in a group."""
    counts = results["n-samples"]
    if task in counts:
        return int(counts[task]["effective"])
    return sum(_samples(child, results) for child in results.get("group_subtasks", {}).get(task, []))
