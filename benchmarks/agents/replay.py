"""Replay an agent trace against `kvq.AsyncLLM`, in this process, and measure what its sessions saw.

    python -m benchmarks.agents.replay --trace trace.jsonl --model DIR [--demand 4] \
        [--options '{"kv": "int8", "max_num_seqs": 32}'] [--json result.json]

The loop is closed: a turn is sent its pause after the turns that it waits for have ended, so a slow engine
gets its requests later. Prompts repeat answers as the trace has them, not as the model gave them, so every
engine gets the same prompts; `--answers actual` repeats what the model gave. The pool has the blocks of all
sessions at their ends divided by `--demand`, unless options size it. Answers are greedy and as long as the
trace says. Tokens are random ids, or with `--text` slices of a file's tokens, which a trained model reads as
text.

`--options`: of the engine, as JSON; `kv` is the format; "{tmp}" in a text stands for an empty folder.
"""

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from benchmarks.agents.trace import Piece, Trace, Turn, TurnId, read_trace
from kvq.bench.timing import percentile
from kvq.engine import AsyncLLM, RequestOutput, SamplingParams
from kvq.errors import ConfigError
from kvq.evals.report.results import envelope, write_json
from kvq.models import Model, load

Tokens = Callable[[Piece], Sequence[int]]
Row = dict[str, Any]
_ROOM = 1.05  # of the longest context, which the pool must hold whatever the demand
MODEL_OPTIONS = ("exact", "dtype", "device", "backend")  # those of `kvq.load`
_TOLD_S = 30.0


def random_ids(vocab_size: int) -> Tokens:
    """Return a source of tokens: random ids of the vocabulary without the first few, often special ones."""

    @cache
    def tokens(piece: Piece) -> Sequence[int]:
        return random.Random(piece.seed).choices(range(8, vocab_size), k=piece.tokens)

    return tokens


def text_ids(ids: Sequence[int]) -> Tokens:
    """Return a source of tokens: slices of a text's tokens at random places, starting over at its end."""

    def tokens(piece: Piece) -> Sequence[int]:
        at = random.Random(piece.seed).randrange(len(ids))
        return [ids[(at + i) % len(ids)] for i in range(piece.tokens)]

    return cache(tokens)


class Replay:
    """One run of a trace."""

    def __init__(self, trace: Trace, engine: AsyncLLM, tokens: Tokens, *, is_actual: bool = False) -> None:
        """`is_actual`: prompts repeat what the model answered."""
        self._trace, self._engine, self._tokens, self._is_actual = trace, engine, tokens, is_actual
        self._ended = {turn.id: asyncio.Event() for turn in trace.turns}
        self._said: dict[TurnId, list[int]] = {}  # a turn's prompt and answer
        self._began = 0.0
        self.rows: list[Row] = []

    async def run(self) -> None:
        """Send all turns and wait for their ends.

        Raises:
            KVQError: a request failed.
        """
        self._began = perf_counter()
        telling = asyncio.create_task(self._tell())
        try:
            async with asyncio.TaskGroup() as group:
                for turn in self._trace.turns:
                    group.create_task(self._one(turn))
        finally:
            telling.cancel()

    async def _one(self, turn: Turn) -> None:
        for other in turn.after:
            await self._ended[other].wait()
        await asyncio.sleep(turn.pause_s)
        prompt = [*(self._said[turn.base] if turn.base else ())]
        for piece in turn.added:
            prompt += self._tokens(piece)
        params = SamplingParams(max_tokens=turn.answer.tokens, temperature=0.0, ignore_eos=True)
        sent, first, output = perf_counter(), None, None
        async for piece in self._engine.stream(prompt, params):
            if first is None and piece.token_ids:
                first = perf_counter()
            output = piece.output
        assert first is not None, "every turn has an answer"
        assert output is not None, "a stream ends with the output"
        said = output.outputs[0].token_ids if self._is_actual else self._tokens(turn.answer)
        self._said[turn.id] = [*prompt, *said]
        self.rows.append(self._row(turn, output, sent, first))
        self._ended[turn.id].set()

    def _row(self, turn: Turn, output: RequestOutput, sent: float, first: float) -> Row:
        receipt = output.receipt
        return {
            "session": turn.session,
            "turn": turn.turn,
            "sent_s": sent - self._began,
            "ttft_s": first - sent,
            "end_s": perf_counter() - self._began,
            "queue_s": output.timing.queue_s,
            "prompt_tokens": receipt.prompt_tokens,
            "cached_tokens": receipt.cached_tokens,
            "host_tokens": getattr(receipt, "host_tokens", 0),
            "disk_tokens": getattr(receipt, "disk_tokens", 0),
            "recomputed_tokens": receipt.recomputed_tokens,
            "preemptions": receipt.preemptions,
            "token_ids": output.outputs[0].token_ids,
        }

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_TOLD_S)
            seconds = perf_counter() - self._began
            told = f"{seconds:6.0f} s: {len(self.rows)} of {len(self._ended)} turns"
            print(told, file=sys.stderr, flush=True)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of a run. `busy_tokens_per_s`: after the first tenth of turns, before the last."""
    ends = sorted(row["end_s"] for row in rows)
    low, high = ends[len(ends) // 10], ends[-1 - len(ends) // 10]
    busy = sum(len(row["token_ids"]) for row in rows if low < row["end_s"] <= high)
    generated = sum(len(row["token_ids"]) for row in rows)
    totals = {
        name: sum(row[name] for row in rows)
        for name in (
            *("prompt_tokens", "cached_tokens", "host_tokens", "disk_tokens"),
            *("recomputed_tokens", "preemptions"),
        )
    }
    ttft = [row["ttft_s"] for row in rows]
    again = [row for row in rows if row["turn"]]
    return {
        "turns": len(rows),
        "seconds": ends[-1],
        "tokens_per_s": generated / ends[-1],
        "total_tokens_per_s": (totals["prompt_tokens"] + generated) / ends[-1],
        "busy_tokens_per_s": busy / (high - low) if high > low else None,
        "ttft_mean_s": sum(ttft) / len(ttft),
        **{f"ttft_p{p}_s": percentile(ttft, p) for p in (50, 90, 95, 99)},
        "ttft_later_turns_p95_s": percentile([row["ttft_s"] for row in again], 95) if again else None,
        "cached_share": totals["cached_tokens"] / totals["prompt_tokens"],
        **totals,
        "generated_tokens": generated,
    }


def pool_blocks(trace: Trace, block_size: int, demand: float) -> int:
    """Return the blocks of a pool for which the trace's demand is `demand` times as much.

    Raises:
        ConfigError: they would not hold the longest context.
    """
    blocks = int(trace.demand_blocks(block_size) / demand)
    if blocks * block_size < _ROOM * trace.longest():
        raise ConfigError(
            f"{blocks} blocks don't hold a context of {trace.longest()} tokens; "
            f"take more sessions or a demand below {demand:g}"
        )
    return blocks


def replace_tmp(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return options with `folder` in place of "{tmp}"."""
    return {
        name: value.replace("{tmp}", folder) if isinstance(value, str) else value
        for name, value in options.items()
    }


def opened(path: str, options: dict[str, Any], text: Path | None) -> tuple[Model, Tokens]:
    """Return the model, loaded with its options, which are taken out of `options`, and a source of tokens."""
    kv = options.pop("kv", "auto")
    model = load(path, kv, **{name: options.pop(name) for name in MODEL_OPTIONS if name in options})
    if text is None:
        return model, random_ids(model.geometry.vocab_size)
    words = text.read_text(encoding="utf-8")
    return model, text_ids(model.tokenizer(words, add_special_tokens=False)["input_ids"])


def prompts(trace: Trace, tokens: Tokens) -> dict[TurnId, list[int]]:
    """Return the prompts of all turns, with answers as the trace has them."""
    return {turn.id: [id for piece in trace.pieces(turn) for id in tokens(piece)] for turn in trace.turns}


async def replay(given: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Load, warm up, run, and return the result."""
    trace = read_trace(given.trace)
    options = replace_tmp(json.loads(given.options), folder)
    model, tokens = opened(given.model, options, given.text)
    if not options.keys() & {"num_blocks", "kv_memory"}:
        options["num_blocks"] = pool_blocks(trace, model.layout.block_size, given.demand)
    async with AsyncLLM(model, **options) as engine:
        warm_up = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        await engine.generate(tokens(Piece(-1, 600)), warm_up)
        run = Replay(trace, engine, tokens, is_actual=given.answers == "actual")
        cpu_s = process_time()
        await run.run()
        cpu_s = process_time() - cpu_s
        counters = engine.core.scheduler.counters
        facts = {
            "trace": trace.about,
            "kv": model.recipe.name,
            "options": options,
            "pool_blocks": [pool.total for pool in engine.core.scheduler.manager.usage()],
            "demand_blocks": trace.demand_blocks(model.layout.block_size),
            "preemptions": counters.preemptions,
            "steps": counters.steps,
            "cpu_s": cpu_s,  # of all threads; far less than both cores' time: others ran, too, or it waited
        }
    facts["peak_rss_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    command = ["python", "-m", "benchmarks.agents.replay", *sys.argv[1:]]
    result = envelope(command, torch.device("cpu"), [summary(run.rows)], facts)
    return result | {"turns": run.rows}


def show(name: str, found: dict[str, Any]) -> None:
    """Print a run in a line."""
    print(
        f"{name}: {found['seconds']:.0f} s, {found['tokens_per_s']:.1f} tokens/s "
        f"({found['total_tokens_per_s']:.0f} with prompts), TTFT mean {found['ttft_mean_s']:.2f} s, "
        f"p50 {found['ttft_p50_s']:.2f}, p95 {found['ttft_p95_s']:.2f}; {found['cached_share']:.1%} cached, "
        f"{found['host_tokens']:,} from host and {found['disk_tokens']:,} from disk; "
        f"{found['preemptions']} preemptions, {found['recomputed_tokens']:,} tokens computed again",
        flush=True,
    )


def main() -> None:
    """Run, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--options", default="{}")
    parser.add_argument("--demand", type=float, default=4.0)
    parser.add_argument("--answers", choices=("fixed", "actual"), default="fixed")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvq-agents-") as folder:
        result = asyncio.run(replay(given, folder))
    show(given.trace.name, result["rows"][0])
    if given.json is not None:
        write_json(given.json, result)


if __name__ == "__main__":
    main()
