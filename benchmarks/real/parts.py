"""Parts of the measurements, and their settings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.real import checked, humaneval, retrieval, rivals
from benchmarks.real.bench import Bench
from benchmarks.real.closeness import compare, in_format, row_of
from benchmarks.real.records import Settings
from kvq.evals.text import EvalText
from kvq.evals.watch import Progress

Measure = Callable[[Bench, str, Settings, Progress], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of the measurements."""

    tokens: int = 16_000  # of WikiText-2; twice as many of the essays
    problems: int = 164
    facts: int = 50
    windows: tuple[int, ...] = (4096, 8192)  # tokens of the essays' windows
    context: int = 8192  # tokens around the facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One kind of measurement. `settings`: those of every row that a format gets."""

    what: str
    settings: Callable[[Bench, Sizes], list[Settings]]
    measure: Measure
    others: tuple[str, ...] = ()  # that are measured beside the formats that are asked for
    when_asked: bool = False  # of every format, or with more than make real brings by itself


def _fitting(bench: Bench, contexts: tuple[int, ...]) -> list[int]:
    return [context for context in contexts if context <= bench.prepared.max_context]


def _of_text(text: EvalText, context: int, tokens: int) -> Settings:
    return {"text": text.digest[:12], "context": context, "tokens": tokens}


def _wikitext(bench: Bench, sizes: Sizes) -> list[Settings]:
    return [_of_text(bench.lab.wikitext(), context, sizes.tokens) for context in _fitting(bench, (1024,))]


def _few(most: int) -> Callable[[Bench, Sizes], list[Settings]]:
    """At most so many tokens of WikiText-2, for what takes long."""
    return lambda bench, sizes: [_of_text(bench.lab.wikitext(), 1024, min(sizes.tokens, most))]


def _essays(bench: Bench, sizes: Sizes) -> list[Settings]:
    contexts = _fitting(bench, sizes.windows)
    return [_of_text(bench.lab.essays(), context, 2 * sizes.tokens) for context in contexts]


def _humaneval(bench: Bench, sizes: Sizes) -> list[Settings]:
    return [{"problems": sizes.problems, "new_tokens": humaneval.NEW_TOKENS}]


def _retrieval(bench: Bench, sizes: Sizes) -> list[Settings]:
    context = min(sizes.context, bench.prepared.max_context)
    text = bench.lab.essays().digest[:12]
    return [{"text": text, "context": context, "facts": sizes.facts, "seed": 0}]


def _measure_text(text: Callable[[Bench], EvalText]) -> Measure:
    def measure(bench: Bench, kv: str, settings: Settings, progress: Progress) -> dict[str, Any]:
        windows = bench.windows(text(bench), context=settings["context"], tokens=settings["tokens"])
        return row_of(*compare(in_format(bench.model, kv), bench.baseline, windows, progress))

    return measure


PARTS = {
    "wikitext": Part(
        what="divergence on WikiText-2, windows of 1,024 tokens",
        settings=_wikitext,
        measure=_measure_text(lambda bench: bench.lab.wikitext()),
    ),
    "essays": Part(
        what="divergence on essays, windows of 4,096 and 8,192 tokens",
        settings=_essays,
        measure=_measure_text(lambda bench: bench.lab.essays()),
    ),
    "humaneval": Part(
        what="functions written greedily, pass@1, and agreement with the solutions",
        settings=_humaneval,
        measure=humaneval.measure,
    ),
    "retrieval": Part(
        what="facts asked for behind 8,192 tokens of essays",
        settings=_retrieval,
        measure=retrieval.measure,
    ),
    "checks": Part(
        what="verdicts of the load check beside what is measured on WikiText-2",
        settings=_few(checked.TOKENS),
        measure=checked.measure,
        when_asked=True,
    ),
    "rivals": Part(
        what="divergence of other engines' KV from their own unquantized KV, on WikiText-2",
        settings=_few(rivals.TOKENS),
        measure=rivals.measure,
        others=rivals.NAMES,
        when_asked=True,
    ),
}
