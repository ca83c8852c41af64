"""Quality behind a ladder: KL of tokens after packed prompts, beside what the share of cold tokens predicts.

    python -m benchmarks.tiers.ladder_quality --model DIR --text FILE [--prompts 12] [--json result.json]

Every prompt is computed, packed in part by other prompts that need the room, restored, and followed by a
continuation whose log-probabilities are compared with those over KV in fp32. The prediction mixes two KLs of
the same prompt by the share of cold tokens in its receipt: over KV in the pool's format, and over KV that was
all rewritten once in the rung's format, both without pressure.
"""

import argparse
import math
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from kvq.engine import LLM, RequestOutput, SamplingParams
from kvq.engine.tiering import rung_bytes, rungs_of
from kvq.evals.report.results import envelope, write_json
from kvq.models import Model, load

TOP = 64  # most likely tokens that are compared; the others count as one


def divergence(wanted: RequestOutput, got: RequestOutput) -> float:
    """Return the mean KL over the prompt tokens with log-probabilities, from the most likely ones of both."""
    found = []
    for one, other in zip(wanted.prompt_logprobs or [], got.prompt_logprobs or [], strict=True):
        if one is None or other is None:
            continue
        p, q = dict(one.top), dict(other.top)
        both = p.keys() & q.keys()
        rest_p, rest_q = (max(1e-9, 1 - sum(math.exp(d[t]) for t in both)) for d in (p, q))
        kl = sum(math.exp(p[t]) * (p[t] - q[t]) for t in both)
        found.append(kl + rest_p * math.log(rest_p / rest_q))
    return statistics.fmean(found)


def score(llm: LLM, tokens: list[int], length: int) -> RequestOutput:
    """Return log-probabilities of the tokens after the first `length`."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=TOP, prompt_logprobs_start=length)
    return llm.generate([tokens], params)[0]


def all_cold(model: Model, rung: str, samples: list[list[int]], length: int) -> list[RequestOutput]:
    """Score continuations of prompts all rewritten once where they are, without pressure."""
    llm, found = ladder_engine(model, rung, 4 * len(samples[0])), []
    manager, codec = llm.core.scheduler.manager, llm.core.runner.cache.codec
    for tokens in samples:
        llm.generate([tokens[:length]], SamplingParams(max_tokens=1))
        held = manager.start(manager.prompt(tokens))
        llm.core.runner.cache.carry_out(manager.take_orders())
        for group in rung_bytes(rungs_of(llm.core.config, model)):
            blocks = held.tables[group]
            codec.decode(group, codec.encode(group, blocks, 1), 1, blocks)
        found.append(score(llm, tokens, length))
        manager.free(held)
        manager.drop_cached()
    llm.close()
    return found


def behind_ladder(
    model: Model, rung: str, samples: list[list[int]], length: int, others: int
) -> list[RequestOutput]:
    """Score continuations of prompts after `others` other prompts that needed room."""
    llm, found, rng = ladder_engine(model, rung, 4 * len(samples[0])), [], random.Random(0)
    for tokens in samples:
        llm.generate([tokens[:length]], SamplingParams(max_tokens=1))
        for _ in range(others):
            other = rng.choices(range(8, model.geometry.vocab_size), k=length)
            llm.generate([other], SamplingParams(max_tokens=1))
        found.append(score(llm, tokens, length))
    llm.close()
    return found


def ladder_engine(model: Model, rung: str, num_tokens: int) -> LLM:
    """Return an engine with room for `num_tokens` and a ladder of one rung."""
    return LLM(model, num_blocks=num_tokens // model.layout.block_size, max_num_seqs=1, kv_ladder=rung)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--continuation", type=int, default=128)
    parser.add_argument("--kv", default="int8")
    parser.add_argument("--rungs", default="int4,int3")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = load(options.model, kv="fp32")
    ids = model.tokenizer(options.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    step, size = len(ids) // options.prompts, options.length + options.continuation
    samples = [ids[i * step : i * step + size] for i in range(options.prompts)]
    scored: dict[str, list[RequestOutput]] = {}
    for kv in ("fp32", options.kv):
        llm = LLM(model.with_kv(kv), num_blocks=512, max_num_seqs=1, prefix_caching=False)
        scored[kv] = [score(llm, tokens, options.length) for tokens in samples]
        llm.close()
    rows: list[dict[str, Any]] = []
    own = [divergence(*both) for both in zip(scored["fp32"], scored[options.kv], strict=True)]
    quantized = model.with_kv(options.kv)
    for rung in options.rungs.split(","):
        outputs = all_cold(quantized, rung, samples, options.length)
        cold = [divergence(*both) for both in zip(scored["fp32"], outputs, strict=True)]
        for others in (1, 2, 3, 5):
            outputs = behind_ladder(quantized, rung, samples, options.length, others)
            shares = [one.receipt.cold_tokens / options.length for one in outputs]
            lost = [options.length - one.receipt.cached_tokens for one in outputs]
            kl = statistics.fmean(divergence(*both) for both in zip(scored["fp32"], outputs, strict=True))
            predicted = statistics.fmean(
                (1 - share) * warm + share * all_ for share, warm, all_ in zip(shares, own, cold, strict=True)
            )
            row = {"rung": rung, "others": others, "cold_share": statistics.fmean(shares), "kl": kl}
            row |= {"predicted": predicted, "lost_tokens": sum(lost), "own": statistics.fmean(own)}
            rows.append(row | {"all_cold": statistics.fmean(cold)})
            print(
                f"{options.kv} -> {rung}, {others} others: {row['cold_share']:.0%} cold, {sum(lost)} lost, ",
                end="",
            )
            print(f"KL {kl:.5f}, predicted {predicted:.5f}, ratio {kl / predicted:.2f}", flush=True)
    if options.json is not None:
        write_json(options.json, envelope(sys.argv, model.weights.device, rows))


if __name__ == "__main__":
    main()
