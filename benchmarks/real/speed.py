"""Time KV formats on the real models of a lab: `python -m benchmarks.real.speed`, formats in turns.

Rows are of one depth and number of sequences: milliseconds between tokens, all sequences in one step, and
from a prompt to its first token, one sequence alone. Weights are int4, as who serves on a CPU has them. Every
format's session is open at once, and they take steps in turns. Only one prompt is read, 8,192 tokens of it at
most; sequences get copies of its blocks, over and over if they are deeper, in blocks of their own.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import kvq
from benchmarks.real.lab import FOLDER, Lab
from benchmarks.real.packages import MODELS
from kvq.bench.timing import percentile
from kvq.blockmgr import Sequence as Held
from kvq.errors import KVQError
from kvq.evals.report.results import envelope, write_json
from kvq.evals.text import text_ids
from kvq.fileio import check_writable
from kvq.models import Model, Session

_STEP = 2048  # tokens of a prompt that are read at once
_MOST_READ = 8192  # tokens
_WARM_UP = 4
Row = dict[str, Any]


class Runner:
    """Sequences of one model over one format, all equally deep."""

    def __init__(
        self, model: Model, kv: str, ids: list[int], *, depth: int, sequences: int, spare: int
    ) -> None:
        """Open a session and read a prompt, which is timed."""
        self.kv, self._ids, self.first_s = kv, ids, []  # type: str, list[int], list[float]
        self._session: Session = model.with_kv(kv).session(
            max_tokens=depth + spare, max_sequences=sequences + 1
        )
        first = self._read()
        self._all = [self._copy(first, depth) for _ in range(sequences)]
        self._session.free(first)

    @property
    def kv_bytes_per_token(self) -> float:
        """Pool bytes of sealed blocks."""
        return self._session.layout.kv_bytes_per_token

    def time_prompt(self) -> None:
        """Time the first token of one more sequence."""
        self._session.free(self._read())

    def time_steps(self, sequences: int, count: int) -> list[float]:
        """Seconds of each of some steps, one token for each of so many sequences."""
        found = []
        for number in range(count):
            token = self._ids[number % len(self._ids)]
            begin = perf_counter()
            self._session.forward([(sequence, [token]) for sequence in self._all[:sequences]])
            found.append(perf_counter() - begin)
        return found

    def _read(self) -> Held:
        begin, sequence = perf_counter(), self._session.new_sequence()
        for at in range(0, len(self._ids), _STEP):
            self._session.forward([(sequence, self._ids[at : at + _STEP])])
        self.first_s.append(perf_counter() - begin)
        return sequence

    def _copy(self, first: Held, depth: int) -> Held:
        """A sequence of blocks of its own with what the first one's hold, again and again."""
        manager, cache = self._session.manager, self._session.cache
        sequence = self._session.new_sequence()
        for at in range(0, depth, _STEP):
            manager.append([(sequence, min(_STEP, depth - at))])
            cache.carry_out(manager.take_orders())
            manager.commit(sequence)
            cache.carry_out(manager.take_orders())
        for group in range(len(self._session.layout.groups)):
            source, target = first.held_in(group), sequence.held_in(group)
            cache.copy(group, list(zip(cycle(source), target, strict=False)))
        return sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Sizes and repeats of the timing."""

    depth: int  # tokens
    rounds: int  # turns of every format
    steps: int  # of a turn
    prompts: int  # that every format reads


def measure(
    model: Model, formats: Sequence[str], text: list[int], sequences: Sequence[int], effort: Effort
) -> list[Row]:
    """One row a format and number of sequences, timed in turns."""
    depth = effort.depth
    spare, ids = len(sequences) * (_WARM_UP + effort.rounds * effort.steps), text[: min(depth, _MOST_READ)]
    most = max(sequences)
    runners = [Runner(model, kv, ids, depth=depth, sequences=most, spare=spare) for kv in formats]
    for _ in range(effort.prompts - 1):
        for runner in runners:
            runner.time_prompt()
    token_bytes = {runner.kv: runner.kv_bytes_per_token for runner in runners}
    rows = []
    for count in sequences:
        between: dict[str, list[float]] = {kv: [] for kv in formats}
        for runner in runners:
            runner.time_steps(count, _WARM_UP)
        for number in range(effort.rounds):
            for runner in runners[:: 1 if number % 2 else -1]:
                between[runner.kv] += runner.time_steps(count, effort.steps)
        rows += [
            {"kv": kv, "depth": depth, "sequences": count, "kv_bytes_per_token": token_bytes[kv]}
            | _told("between_ms", between[kv], between[formats[0]])
            for kv in formats
        ]
    for runner, row in zip(runners, rows if depth == len(ids) else [], strict=False):
        row.update(_told("first_ms", runner.first_s, runners[0].first_s))
    return rows


def _told(name: str, seconds: list[float], against: list[float]) -> Row:
    """Median and spread in milliseconds, and medians' ratio to the first format's."""
    return {
        name: round(1000 * median(seconds), 3),
        f"{name}_p10": round(1000 * percentile(seconds, 10), 3),
        f"{name}_p90": round(1000 * percentile(seconds, 90), 3),
        f"{name}_ratio": round(median(seconds) / median(against), 4),
    }


def _integers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main(arguments: Sequence[str]) -> None:
    """Measure and print, and keep rows as they come."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="the lab (%(default)s)")
    parser.add_argument("--models", default="qwen05,qwen15", help=f"of {', '.join(MODELS)} (%(default)s)")
    parser.add_argument("--kv", default="int8,int4", help="formats, ratios are to the first (%(default)s)")
    parser.add_argument("--depths", type=_integers, default=[200, 512, 8192], help="tokens of prompts")
    parser.add_argument("--sequences", type=_integers, default=[1, 8], help="in a step")
    parser.add_argument("--weights", default="int4", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="turns of every format (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of a turn (%(default)s)")
    parser.add_argument("--prompts", type=int, default=3, help="read by every format (%(default)s)")
    parser.add_argument("--out", type=Path, help="a JSON")
    options = parser.parse_args(arguments)
    if options.out is not None:
        check_writable(options.out)
    rows: list[Row] = []
    lab = Lab(folder=options.folder)
    for name in options.models.split(","):
        model = kvq.load(lab.model(name), weights=options.weights)
        text = text_ids(model.prepared.tokenizer, lab.essays().text[: 12 * _MOST_READ])
        for depth in options.depths:
            effort = Effort(depth=depth, rounds=options.rounds, steps=options.steps, prompts=options.prompts)
            found = measure(model, options.kv.split(","), text, options.sequences, effort)
            rows += [{"model": name, "weights": options.weights} | row for row in found]
            for row in rows[-len(found) :]:
                print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        if options.out is not None:
            command = ["python", "-m", "benchmarks.real.speed", *arguments]
            write_json(options.out, envelope(command, torch.device("cpu"), rows))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (KVQError, OSError) as error:
        sys.exit(f"python -m benchmarks.real.speed: {error}")
