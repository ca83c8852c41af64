"""Agent traces: turns that are sent some time after others have ended, so that slow engines get them later.

A trace is JSON lines. The first has the `format_version`, every other one is a turn:

    {"session": "s3", "turn": 2, "base": ["s3", 1], "after": [["s3", 1]], "pause_s": 4.1,
     "added": [[81, 412]], "answer": [82, 64]}

Its prompt is that of turn `base` with the answer, and the pieces `added`, each [seed, number of tokens].
"""

import random
from array import array
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from kvq import strict_json
from kvq.capacity.fleet.arrivals import Call, drawn_tokens
from kvq.capacity.fleet.records import Records
from kvq.errors import ConfigError

_Id = tuple[str, int]  # session, turn


class _Turn(NamedTuple):
    id: _Id
    base: _Id | None
    after: list[_Id]
    pause_s: float
    pieces: "list[array[int]]"  # tokens that the prompt adds, and those of the answer


class AgentTrace:
    """Turns of an agent trace."""

    def __init__(self, path: Path, *, repeats_trace: bool = False) -> None:
        """Read a trace. `repeats_trace`: prompts repeat answers of the trace instead of those of engines.

        Raises:
            ConfigError: a line is invalid.
        """
        self._repeats_trace = repeats_trace
        self.turns: list[_Turn] = []
        self._followers: dict[_Id | None, list[_Turn]] = {None: []}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[1:], 2):
            try:
                turn = _turn(strict_json.loads(line))
                _ = self._followers[turn.base]  # KeyError: it does not come before this one
                for other in turn.after:
                    self._followers[other].append(turn)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ConfigError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
            self.turns.append(turn)
            self._followers[turn.id] = []

    def calls(self, records: Records, step: Callable[[float], bool]) -> Iterator[Call]:
        """Yield turns when they are due. `step` runs a step that begins before a time, if there is one."""
        left = {turn.id: len(turn.after) for turn in self.turns}
        due = [(turn.pause_s, turn) for turn in self.turns if not turn.after]
        heapify(due)
        said: dict[_Id | None, array[int]] = {None: array("I")}  # prompts with answers
        running: dict[int, _Turn] = {}
        while due or running:
            if not step(due[0][0] if due else inf):
                now, turn = heappop(due)
                *added, answer = turn.pieces
                prompt, number = sum(added, said[turn.base]), len(records)
                call = Call(
                    number=number, arrival_s=now, prompt=prompt, output_tokens=len(answer), session=turn.id[0]
                )
                said[turn.id] = prompt + (answer if self._repeats_trace else call.answer(0, len(answer)))
                running[number] = turn
                yield call
            for number in [number for number in running if records.fate[number]]:
                for turn in self._followers[running.pop(number).id]:
                    left[turn.id] -= 1
                    if not left[turn.id]:
                        heappush(due, (records.end_s[number] + turn.pause_s, turn))


def _turn(data: dict[str, Any]) -> _Turn:
    pieces = [drawn_tokens(random.Random(seed), count) for seed, count in (*data["added"], data["answer"])]
    if len(pieces) < 2 or not all(pieces) or not 0 <= data["pause_s"] < inf:
        raise ValueError("pieces must have tokens, and pauses at least 0 s")
    base, *after = [one and (one[0], one[1]) for one in (data["base"], *data["after"])]
    return _Turn((data["session"], data["turn"]), base, after, data["pause_s"], pieces)
