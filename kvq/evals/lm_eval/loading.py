"""Loader of lm-eval's tasks, whose files, functions and data are third-party.

lm-eval is imported only when tasks are loaded.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvq.errors import ConfigError, RequestError, first_lines, nearest

_SUFFIXES = (".yaml", ".yml")

Loaded = tuple[str, dict[str, Any]]  # the name, and what lm-eval's TaskManager loads for it


@dataclass(frozen=True, kw_only=True, slots=True)
class LMEvalPlan:
    """Options for running tasks."""

    include_path: str | Path | None = None  # folder with additional task files
    limit: int | None = None  # number of samples per task, counted from the first
    num_fewshot: int | None = None  # examples before each question, unless the task fixes them
    apply_chat_template: bool = False
    seed: int = 1234  # lm-eval's default; for choosing examples, and for tasks that sample

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise RequestError(f"limit must be at least 1 sample, got {self.limit}")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise RequestError(f"num_fewshot must be at least 0, got {self.num_fewshot}")


def load_tasks(tasks: Sequence[str], *, include_path: str | Path | None = None) -> list[Loaded]:
    """Find all `tasks` and load their data.

    Raises:
        RequestError: a task is unknown or broken, or its data can't be read.
    """
    from lm_eval.tasks import TaskManager

    if isinstance(tasks, str) or not tasks:
        raise RequestError(f"tasks must be a list of at least one task, got {tasks!r}")
    if include_path is not None and not Path(include_path).is_dir():
        raise RequestError(f"include_path must be a folder with task files, got {str(include_path)!r}")
    alone = include_path is None and all(task.endswith(_SUFFIXES) and not _is_group(task) for task in tasks)
    with _quiet_datasets(), quiet_bars():
        try:
            manager = TaskManager(
                include_path=None if include_path is None else str(include_path), include_defaults=not alone
            )
        except Exception as error:  # any error of lm-eval's on a folder's files
            raise RequestError(f"the tasks can't be listed: {first_lines(error)}") from error
        names = dict.fromkeys(name for task in tasks for name in _names(manager, task))
        return [(name, _load(manager, name)) for name in names]


def task_metrics(loaded: Sequence[Loaded]) -> dict[str, list[str]]:
    """Return the metrics of each loaded task or group, keyed by name."""
    found: dict[str, list[str]] = {}
    for _, spec in loaded:
        for name, group in spec.get("groups", {}).items():
            metrics = [one.metric for one in group.aggregate_metric_list or []]
            if metrics:
                found[name] = list(dict.fromkeys(metrics))
        for name, task in spec["tasks"].items():
            found[name] = list(task.aggregation())
    return found


@contextmanager
def quiet_bars() -> Iterator[None]:
    """Hide lm-eval's progress bars, and send all output of lm-eval and its tasks to standard error."""
    from tqdm import tqdm

    silent = partialmethod(tqdm.__init__, disable=True)
    with patch.object(tqdm, "__init__", silent), redirect_stdout(sys.stderr):
        yield


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Refuse to run code that comes with datasets, and hide progress bars of `datasets`."""
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


def _is_group(path: str) -> bool:
    """Return True if a file may refer to lm-eval's own tasks, which take seconds to list."""
    try:
        lines = Path(path).expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    return any(line.startswith("group:") for line in lines)


def _names(manager: Any, task: str) -> list[str]:
    """Return the task names or the file that `task` refers to, or raise RequestError if there are none."""
    if task.endswith(_SUFFIXES):
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
    """Build a task or group, including reading its data."""
    try:
        loaded: dict[str, Any] = manager.load([name])
    except Exception as error:  # a task's file, functions and data are third-party
        raise RequestError(f"the task {name} can't be loaded: {_reason(error)}") from error
    for task_name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise RequestError(f"the task {task_name} runs code that the model wrote, which kvq never does")
    if not loaded["tasks"]:
        raise RequestError(f"the task {name} is an empty group; nothing can be run")
    return loaded


def _reason(error: Exception) -> str:
    """Return a one-line description of an error and its fix."""
    text = first_lines(error)
    if isinstance(error, ConnectionError | TimeoutError):
        return (
            f"{text}; its data lies on the Hugging Face Hub, which can't be reached. Load it once with a "
            f"network, or give a task file with `dataset_path: json` and data_files of your own"
        )
    if isinstance(error, FileNotFoundError):
        return f"{text}; relative data_files start at the current folder, {Path.cwd()}"
    return f"{type(error).__name__}: {text}"
