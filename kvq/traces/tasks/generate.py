"""Generation of sessions by task and seed."""

from collections.abc import Callable
from functools import partial
from random import Random

from kvq.errors import ConfigError
from kvq.traces.sessions import RecordedSession
from kvq.traces.tasks.arithmetic import ARITHMETIC
from kvq.traces.tasks.calendar import CALENDAR
from kvq.traces.tasks.edits import talk_of_edits
from kvq.traces.tasks.files import FILES
from kvq.traces.tasks.lookup import LOOKUP
from kvq.traces.tasks.recall import talk_of_recall
from kvq.traces.tasks.table import talk_about
from kvq.traces.tasks.talk import Talk

_TABLES = {"calendar": CALENDAR, "files": FILES, "arithmetic": ARITHMETIC, "lookup": LOOKUP}
TASKS = (*_TABLES, "tools", "edits", "recall")
_LEAST_TOKENS, _MOST_TOKENS = 1_000, 30_000


def generated(
    task: str, count: int, seed: int, *, tokens: int = 2_000, text: str | None = None
) -> list[RecordedSession]:
    """Return `count` sessions of a task, each of about `tokens` tokens, counted as 4 characters each.

    A session depends on the task, the seed, its number and the options alone, not on `count`. `text`: what
    the documents of "recall" are made of; by default, of facts alone.

    Raises:
        ConfigError: the task is unknown, or can't have these options.
    """
    if task not in TASKS:
        raise ConfigError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    if not _LEAST_TOKENS <= tokens <= _MOST_TOKENS:
        raise ConfigError(f"tokens must be from {_LEAST_TOKENS} to {_MOST_TOKENS}, got {tokens}")
    if text is not None and task != "recall":
        raise ConfigError(f"text is for the task recall, got {task!r}")
    return [_session(task, f"{task}-{seed}-{at}", at, tokens, text) for at in range(count)]


def _session(task: str, name: str, at: int, tokens: int, text: str | None) -> RecordedSession:
    makers: dict[str, Callable[[Random, int], Talk]] = {
        "edits": talk_of_edits,
        "recall": partial(talk_of_recall, text=text),
        **{one: partial(talk_about, domain) for one, domain in _TABLES.items()},
    }
    which = list(_TABLES)[at % len(_TABLES)] if task == "tools" else task
    talk = makers[which](Random(name), tokens)
    return RecordedSession(name=name, messages=talk.messages, tools=talk.tools, is_checked=True)
