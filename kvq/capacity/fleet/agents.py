"""Agent traces: turns that are sent some time after others have ended, so that slow engines get them later.

docs/capacity.md describes the format.
"""

import random
from array import array
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Any

from kvq import strict_json
from kvq.capacity.fleet.arrivals import Call, drawn_tokens
from kvq.capacity.fleet.records import Records
from kvq.errors import ConfigError


class AgentTrace:
    """Turns of an agent trace."""

    def __init__(self, path: Path, *, repeats_trace: bool = False) -> None:
        """Read a trace, or raise ConfigError. `repeats_trace`: prompts have its answers, not the engines'."""
        self._repeats_trace = repeats_trace
        self.turns: list[dict[str, Any]] = []  # with tokens for pieces and numbers for other turns
        numbers: dict[tuple[str, int], int] = {}
        for at, line in enumerate(path.read_text(encoding="utf-8").splitlines()[1:]):
            try:
                turn = strict_json.loads(line)
                pieces = [
                    drawn_tokens(random.Random(seed), n) for seed, n in (*turn["added"], turn["answer"])
                ]
                if len(pieces) < 2 or not all(pieces) or not 0 <= turn["pause_s"] < inf:
                    raise ValueError("pieces must have tokens, and pauses at least 0 s")
                base, *after = [one and numbers[tuple(one)] for one in (turn["base"], *turn["after"])]
            except (ValueError, KeyError, TypeError) as error:  # KeyError: no turn before it
                raise ConfigError(f"{path}, line {at + 2}: {type(error).__name__}: {error}") from error
            self.turns.append(turn | {"pieces": pieces, "base": base, "after": after, "next": []})
            numbers[turn["session"], turn["turn"]] = at
            for other in after:
                self.turns[other]["next"].append(at)

    def calls(self, records: Records, step: Callable[[float], bool]) -> Iterator[Call]:
        """Yield turns when they are due. `step` runs a step that begins before a time, if there is one."""
        left = [len(turn["after"]) for turn in self.turns]
        due = sorted([(turn["pause_s"], at) for at, turn in enumerate(self.turns) if not left[at]])  # a heap
        said: dict[int | None, array[int]] = {None: array("I")}  # prompts with answers
        running: dict[int, int] = {}  # turns by call
        while due or running:
            if not step(due[0][0] if due else inf):
                now, at = heappop(due)
                turn, number = self.turns[at], len(records)
                *added, answer = turn["pieces"]
                prompt, name = sum(added, said[turn["base"]]), str(turn["session"])
                call = Call(
                    number=number, arrival_s=now, prompt=prompt, output_tokens=len(answer), session=name
                )
                said[at] = prompt + (answer if self._repeats_trace else call.answer(0, len(answer)))
                running[number] = at
                yield call
            for number in [number for number in running if records.fate[number]]:
                for at in self.turns[running.pop(number)]["next"]:
                    left[at] -= 1
                    if not left[at]:
                        heappush(due, (records.end_s[number] + self.turns[at]["pause_s"], at))
