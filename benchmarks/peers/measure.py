"""One part: contenders opened, checked and timed in turn."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.loads import Contender, Part
from benchmarks.peers.process import Process, Turn
from benchmarks.peers.quota import limited
from benchmarks.peers.rows import agreement, refusal, row
from kvq.bench.engine.load import Load, LoadRequest
from kvq.bench.timing import in_turn
from kvq.errors import EngineError

REFERENCE = Contender(engine="reference", weights="fp32", kv="fp32")
_MODULES = {
    "reference": "benchmarks.peers.run_reference",
    "kvq": "benchmarks.peers.run_kvq",
    "transformers": "benchmarks.peers.run_transformers",
    "openvino": "benchmarks.peers.run_openvino",
    "llama.cpp": "benchmarks.peers.run_llama",
}
_CHECK = (128, 64)  # tokens in and out
_WARM_UP, _TRIAL, _CHECKED = -1, -2, -3  # draws beside those of the turns

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Place where contenders run."""

    pythons: dict[str, str]  # interpreters by engine; who has none doesn't take part
    models: dict[str, Path]  # folder or file by engine and weights: `openvino/int8`; `kvq` has one for all
    threads: tuple[int | None, ...]  # numbers that each tries, None: its own choice
    quota: float | None = None  # cores

    def open(self, contender: Contender, part: Part, threads: int | None) -> Process:
        """A contender's process, ready for turns.

        Raises:
            EngineError: it ended.
            ConfigError: no group with a quota can be made.
        """
        engine = contender.engine
        settings = {
            "model": str(self.models.get(f"{engine}/{contender.weights}", self.models["kvq"])),
            "weights": contender.weights,
            "kv": contender.kv,
            "threads": threads,
            "requests": part.requests,
            "tokens": max(part.tokens, sum(_CHECK)),
        }
        group = None
        if self.quota is not None:
            group = limited(self.quota, f"kvq-peers-{time.monotonic_ns()}")
        return Process(self.pythons[engine], _MODULES[engine], settings, group)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Opened:
    """A contender that gave the right tokens, with the number of threads that suits it."""

    contender: Contender
    process: Process
    facts: dict[str, Any]


class Expected:
    """The reference's tokens."""

    def __init__(self, place: Place, part: Part, load: Load) -> None:
        self.requests = checking(load)
        with place.open(REFERENCE, part, place.threads[-1]) as process:
            prompts = [request.prompt for request in self.requests]
            found = process.ask({"prompts": prompts, "output_tokens": _CHECK[1]})
        (self.tokens,), (self.gaps,) = found["tokens"], found["gaps"]

    def check(self, contender: Contender, process: Process) -> dict[str, Any]:
        """Compare a contender's tokens of its first turn with the reference.

        Raises:
            EngineError: see `agreement`.
        """
        (served,) = process.turn(self.requests).run.served
        return agreement(contender, self.tokens, served.tokens, self.gaps)


def checking(load: Load) -> list[LoadRequest]:
    """One request of 128 tokens and 64 more, whatever the load."""
    prompt = replace(load.input_lengths, low=_CHECK[0], high=_CHECK[0])
    output = replace(load.output_lengths, low=_CHECK[1], high=_CHECK[1])
    return replace(load, num_requests=1, input_lengths=prompt, output_lengths=output).draw(_CHECKED)


def open_best(place: Place, part: Part, load: Load, contender: Contender, expected: Expected) -> Opened:
    """Open it with each number of threads; the fastest stays.

    Raises:
        EngineError: it ended, or computes something else.
    """
    tried: dict[Opened, float] = {}
    with ExitStack() as stack:
        for threads in place.threads:
            process = stack.enter_context(place.open(contender, part, threads))
            check = expected.check(contender, process)
            process.turn(load.draw(_WARM_UP))
            facts = {"threads": threads, **check, "settings": process.about}
            one = Opened(contender=contender, process=process, facts=facts)
            tried[one] = part.rate(process.turn(load.draw(_TRIAL)).run)
        best = max(tried, key=lambda one: tried[one])
        stack.pop_all()
    for one in tried.keys() - {best}:
        one.process.close()
    best.facts["threads_tried"] = {str(one.facts["threads"] or "auto"): rate for one, rate in tried.items()}
    return best


def measure(
    place: Place, name: str, part: Part, contenders: Sequence[Contender], load: Load, turns: int
) -> Rows:
    """Rows of one part. One that can't take part has a row that says why.

    Raises:
        ConfigError: no group with a quota can be made.
        EngineError: the reference failed, or somebody ended between turns.
    """
    refused: Rows = []
    with ExitStack() as stack:
        opened: list[Opened] = []
        expected = Expected(place, part, load)
        for contender in contenders:
            try:
                one = open_best(place, part, load, contender, expected)
            except EngineError as error:
                refused.append(refusal(name, contender, error))
                continue
            stack.callback(one.process.close)
            opened.append(one)
        taken: dict[Contender, list[Turn]] = {one.contender: [] for one in opened}
        for turn, one in in_turn(opened, turns):
            taken[one.contender].append(one.process.turn(load.draw(turn)))
    rows = [row(name, part, one.contender, taken[one.contender]) | one.facts for one in opened]
    return [*rows, *refused]
