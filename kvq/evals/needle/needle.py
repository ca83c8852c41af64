"""Needle eval: retrieval from long contexts, with a needle at each depth of a haystack, queried at the end.

Prompts are processed in chunks, and answers are decoded greedily, one token per step, on the session's
write-then-read path: tokens are first quantized into blocks, and attention then reads these blocks. All
formats answer the same prompts. Source: Kamradt, "Needle in a haystack", 2023; keys with values, and
distractor needles, as in Hsieh et al., "RULER", 2024.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvq.errors import RequestError
from kvq.evals.needle.prompts import NeedlePlan, NeedlePrompt, NeedlePrompts
from kvq.evals.report.bootstrap import wilson_interval
from kvq.evals.watch import UNWATCHED, Watch
from kvq.formats import KVRecipe
from kvq.models import Model, Session
from kvq.models.loading.prepared import PreparedModel

LENGTHS = (512, 1024, 2048, 4096)  # tokens
# D38: the test is void if the baseline retrieves nothing
VOID_AFTER = 50  # prompts; if a model answers a tenth of them, one test in 200 is void


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedleRow:
    """Retrieval of one format at one length and depth."""

    kv: str
    length: int  # number of tokens of the prompt and its answer
    depth: float  # 0: the needle comes first; 1: it comes last, before the question
    trials: int
    hits: int  # number of answers with every token correct
    retrieved: float  # hits / trials
    token_accuracy: float  # share of answer tokens that are correct at their position
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedleSummary:
    """Retrieval of one format, summarized over all lengths and depths."""

    kv: str
    trials: int
    retrieved: float
    retrieved_low: float  # Wilson's 95% interval
    retrieved_high: float
    token_accuracy: float
    seconds: float


class _Answer(NamedTuple):
    """Result of one prompt."""

    right: int  # number of tokens that are correct at their position
    tokens: int
    seconds: float


def _row(kv: str, length: int, depth: float, answers: list[_Answer]) -> NeedleRow:
    hits = sum(one.right == one.tokens for one in answers)
    return NeedleRow(
        kv=kv,
        length=length,
        depth=depth,
        trials=len(answers),
        hits=hits,
        retrieved=hits / len(answers),
        token_accuracy=sum(one.right for one in answers) / sum(one.tokens for one in answers),
        seconds=sum(one.seconds for one in answers),
    )


def measure_needle(
    model: Model, kv: str | Sequence[str | KVRecipe], text: str, plan: NeedlePlan, watch: Watch = UNWATCHED
) -> list[NeedleRow]:
    """Measure how often each format retrieves the needle; rows are ordered by format, length and depth.

    `watch` receives the number of answered prompts across all formats. The first format runs first. If this
    format is unquantized and retrieves nothing in `VOID_AFTER` prompts across the grid, the test is void: it
    stops, and only the rows of the first format are returned.

    Raises:
        RequestError: no format is named, the text is too short, or a length is too short for the needle or
            exceeds the model's context.
        ConfigError: a format is unknown, doesn't fit the model, or lacks its scales.
    """
    names: list[str | KVRecipe] = [kv] if isinstance(kv, str | KVRecipe) else list(kv)
    if not names:
        raise RequestError("no KV format was named; try fp32,int8,int4")
    prompts, sizes = needle_prompts(model.prepared, text, plan)
    models = [model.with_kv(name) for name in names]
    sessions = [one.session(max_tokens=max(sizes)) for one in models]
    grid = list(itertools.product(range(plan.trials), sizes, dict.fromkeys(plan.depths)))
    asked = [(0, *place) for place in grid]
    asked += [(which, *place) for place in grid for which in range(1, len(models))]
    cells: dict[tuple[int, int, float], list[_Answer]] = defaultdict(list)

    def rows() -> list[NeedleRow]:
        ordered = sorted(cells.items(), key=lambda item: item[0][0])
        return [_row(models[which].recipe.name, n, depth, found) for (which, n, depth), found in ordered]

    for done, (which, trial, length, depth) in enumerate(asked, start=1):
        prompt = prompts.make(length=length, depth=depth, trial=trial)
        began = time.perf_counter()
        given = _answer(sessions[which], prompt, plan.chunk)
        right = sum(a == b for a, b in zip(given, prompt.answer, strict=True))
        answer = _Answer(right, len(prompt.answer), time.perf_counter() - began)
        cells[which, length, depth].append(answer)
        watch.progress(done, len(asked))
        watch.keep(rows)
        may_be_void = done in (VOID_AFTER, len(grid)) and not models[0].recipe.is_quantized
        if may_be_void and not any(one.right == one.tokens for one in itertools.chain(*cells.values())):
            break
    return rows()


def void_reason(rows: Sequence[NeedleRow]) -> str | None:
    """Return the reason why rows of `measure_needle` say nothing about formats, or None."""
    asked = sum(row.trials for row in rows)
    if len({row.kv for row in rows}) > 1 or any(row.hits for row in rows) or not asked:
        return None
    return f"{rows[0].kv} found nothing in {asked} prompts, so other formats have nothing to lose"


def needle_prompts(model: PreparedModel, text: str, plan: NeedlePlan) -> tuple[NeedlePrompts, list[int]]:
    """Return the prompt generator of a plan, and the lengths of its prompts.

    Raises:
        RequestError: as in `measure_needle`.
    """
    limit = model.max_context
    for length in plan.lengths or ():
        if not 1 <= length <= limit:
            raise RequestError(
                f"a length of {length} tokens was asked for; this model takes 1 to {limit}, answer included"
            )
    prompts = NeedlePrompts(model.tokenizer, text, plan, vocab_size=model.geometry.vocab_size)
    if plan.lengths is None:
        taken = [n for n in LENGTHS if n <= limit] or [limit]
        sizes = [n for n in taken if n <= prompts.text_tokens] or taken[:1]
    else:
        sizes = list(dict.fromkeys(plan.lengths))
    for length, depth in itertools.product(sizes, plan.depths):
        prompts.make(length=length, depth=depth, trial=0)  # raises errors before any work is done
    return prompts, sizes


def summarize_needle(rows: Iterable[NeedleRow]) -> list[NeedleSummary]:
    """Summarize all cells of each format; formats are ordered by first occurrence."""
    groups: dict[str, list[NeedleRow]] = {}
    for row in rows:
        groups.setdefault(row.kv, []).append(row)
    summaries = []
    for kv, cells in groups.items():
        trials, hits = sum(r.trials for r in cells), sum(r.hits for r in cells)
        low, high = wilson_interval(hits, trials)
        summaries.append(
            NeedleSummary(
                kv=kv,
                trials=trials,
                retrieved=hits / trials,
                retrieved_low=low,
                retrieved_high=high,
                token_accuracy=sum(r.token_accuracy * r.trials for r in cells) / trials,
                seconds=sum(r.seconds for r in cells),
            )
        )
    return summaries


def _answer(session: Session, prompt: NeedlePrompt, chunk: int) -> list[int]:
    """Decode greedily and return as many tokens as the expected answer has."""
    sequence = session.new_sequence()
    try:
        for at in range(0, len(prompt.ids), chunk):
            result = session.forward([(sequence, prompt.ids[at : at + chunk])])[0]
        given = [int(result.trusted_logits()[-1].argmax())]
        while len(given) < len(prompt.answer):
            result = session.forward([(sequence, given[-1:])])[0]
            given.append(int(result.trusted_logits()[-1].argmax()))
    finally:
        session.free(sequence)
    return given
