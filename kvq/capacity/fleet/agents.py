"""Agent traces: turns that are sent some time after others have ended, so that slow engines get them later.

docs/capacity.md describes the format.
"""

import random
from array import array
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from json import JSONDecodeError
from math import inf
from pathlib import Path
from typing import Any

from kvq import strict_json
from kvq.capacity.fleet.arrivals import Call, drawn_tokens
from kvq.capacity.fleet.records import Records
from kvq.errors import ConfigError, not_one_of

FORMAT_VERSION = 1
_MOST_TOKENS = 1 << 24  # of a piece
_PIECE = f"[seed, tokens] in whole numbers, with 1 to {_MOST_TOKENS:,} tokens"
Turns = dict[Any, dict[str, Any]]  # fields by (session, turn)


def read_agents(path: Path) -> Turns:
    """Return the turns of an agent trace. Ids of turns are tuples; those of `base` are also in `after`.

    Raises:
        ConfigError: a line is invalid; the message includes its number, the field, and what is allowed.
    """
    turns: Turns = {}
    for number, line in enumerate(path.read_text(encoding="utf-8-sig", errors="replace").splitlines(), 1):
        try:
            data = strict_json.loads(line)
            data = data if isinstance(data, dict) else {}
            if number > 1:
                turns[data.get("session"), data.get("turn")] = _checked(data, turns)
            elif data.get("format_version") != FORMAT_VERSION:
                raise ValueError(f"format_version must be {FORMAT_VERSION}")
        except ValueError as error:
            what = "it is no JSON" if isinstance(error, JSONDecodeError) else str(error)
            raise ConfigError(f"{path}, line {number}: {what}") from error
    if not turns:
        raise ConfigError(f"{path} has no turns")
    return turns


def _checked(turn: dict[str, Any], earlier: Turns) -> dict[str, Any]:
    """Return a turn as `read_agents` does. Raises ValueError if a field is invalid."""

    def are(ones: Any, kind: type) -> bool:  # ids if `kind` is `str`, otherwise pieces
        return isinstance(ones, list) and all(
            isinstance(one, list)
            and [*map(type, one)] == [kind, int]
            and (tuple(one) in earlier if kind is str else 0 < one[1] <= _MOST_TOKENS)
            for one in ones
        )

    names = ("session", "turn", "base", "after", "pause_s", "added", "answer")
    if unknown := [name for name in turn if name not in names]:
        raise ValueError(not_one_of("each field", unknown[0], names))
    values: list[Any] = [turn.get(name) for name in names]
    session, number, base, after, pause_s, added, answer = values
    is_new = type(number) is int and (str(session), number) not in earlier
    rules = {
        "session must be a text": isinstance(session, str),
        "turn must be a whole number that the session did not have": is_new,
        "base must be null or the [session, turn] of a line before": base is None or are([base], str),
        "after must be a list of [session, turn] of lines before": are(after, str),
        "pause_s must be seconds of at least 0": type(pause_s) in (int, float) and pause_s >= 0,
        f"added must be a list of {_PIECE}, and not empty": added != [] and are(added, int),
        f"answer must be {_PIECE}": are([answer], int),
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"{rule}, got {turn.get(rule.split()[0])!r}")
    ids = dict.fromkeys(tuple(one) for one in (*after, *([base] if base else [])))
    return turn | {"base": base and tuple(base), "after": [*ids]}


def agent_calls(
    turns: Turns, records: Records, step: Callable[[float], bool], *, repeats_trace: bool = False
) -> Iterator[Call]:
    """Yield turns when they are due. `step` runs a step that begins before a time, if there is one.

    `repeats_trace`: prompts have the answers of the trace, not those of the simulated engines.
    """
    left = {id: {*turn["after"]} for id, turn in turns.items()}  # what has to end first
    due = sorted([(turn["pause_s"], id) for id, turn in turns.items() if not left[id]])  # a heap
    said: dict[Any, array[int]] = {None: array("I")}  # prompts with answers
    running: dict[int, tuple[str, int]] = {}  # turns by call
    while due or running:
        if not step(due[0][0] if due else inf):
            now, id = heappop(due)
            turn, number = turns[id], len(records)
            *added, answer = [drawn_tokens(random.Random(x), n) for x, n in (*turn["added"], turn["answer"])]
            prompt, count = sum(added, said[turn["base"]]), len(answer)
            call = Call(number=number, arrival_s=now, prompt=prompt, output_tokens=count, session=id[0])
            said[id] = prompt + (answer if repeats_trace else call.answer(0, count))
            running[number] = id
            yield call
        for number in [number for number in running if records.fate[number]]:
            ended = running.pop(number)
            for id in [id for id, before in left.items() if ended in before]:
                left[id].remove(ended)
                if not left[id]:
                    heappush(due, (records.end_s[number] + turns[id]["pause_s"], id))
