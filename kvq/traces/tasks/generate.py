"""Generation of sessions by task and seed."""

import json
from random import Random

from kvq.errors import ConfigError
from kvq.traces.sessions import RecordedSession
from kvq.traces.tasks.edits import edits_messages
from kvq.traces.tasks.recall import recall_messages
from kvq.traces.tasks.tables import TABLES, table_messages
from kvq.traces.tasks.worlds import RULES, WORLDS, tool

TASKS = (*TABLES, "tools", "edits", "recall")
_LEAST_TOKENS, _MOST_TOKENS = 1_000, 30_000
_CHARS_PER_TOKEN = 4  # a rough count, for any tokenizer
_SPARE = 1100  # characters that requests, calls and short results take


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
    worlds = tuple(TABLES) if task == "tools" else (task,)
    return [_session(worlds[at % len(worlds)], f"{task}-{seed}-{at}", tokens, text) for at in range(count)]


def _session(world: str, name: str, tokens: int, text: str | None) -> RecordedSession:
    random = Random(name)
    tools = [tool(name, **one) for name, one in WORLDS[world]["tools"].items()]
    chars = tokens * _CHARS_PER_TOKEN - len(json.dumps(tools)) - len(RULES) - _SPARE
    if world == "edits":
        messages = edits_messages(random, chars)
    elif world == "recall":
        messages = recall_messages(random, chars, text)
    else:
        messages = table_messages(world, random, chars)
    messages.insert(0, {"role": "system", "content": RULES})
    return RecordedSession(name=name, messages=messages, tools=tools, is_checked=True)
