"""Quality behind a ladder: KL of tokens after packed prompts, beside what the share of cold tokens predicts.

    python -m benchmarks.tiers.ladder_quality --model DIR --text FILE [--prompts 12] [--json result.json]

Every prompt is computed, packed by other prompts that need the room, restored, and followed by a continuation
whose log-probabilities are compared with those over KV in fp32. The prediction mixes the KL of the pool's
format and of the rung's format, each measured without a ladder, by the share of cold tokens in the receipt.
"""

import argparse
import math
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from kvq.engine import LLM, RequestOutput, SamplingParams
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


def behind_ladder(model: Model, rung: str, samples: list[list[int]], length: int) -> list[RequestOutput]:
    """Score continuations of prompts that a ladder has packed meanwhile."""
    size, found = model.layout.block_size, []
    llm = LLM(model, num_blocks=4 * -(-len(samples[0]) // size), max_num_seqs=1, kv_ladder=rung)
    rng = random.Random(0)
    for tokens in samples:
        llm.generate([tokens[:length]], SamplingParams(max_tokens=48, ignore_eos=True))
        for _ in range(5):
            other = rng.choices(range(8, model.geometry.vocab_size), k=length)
            llm.generate([other], SamplingParams(max_tokens=1))
        found.append(score(llm, tokens, length))
    llm.close()
    return found


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
    for kv in ("fp32", options.kv, *options.rungs.split(",")):
        llm = LLM(model.with_kv(kv), num_blocks=512, max_num_seqs=1, prefix_caching=False)
        scored[kv] = [score(llm, tokens, options.length) for tokens in samples]
        llm.close()
    rows: list[dict[str, Any]] = []
    for rung in options.rungs.split(","):
        packed = behind_ladder(model.with_kv(options.kv), rung, samples, options.length)
        means = {
            name: statistics.fmean(map(divergence, scored["fp32"], outputs))
            for name, outputs in {"own": scored[options.kv], "rung": scored[rung], "mix": packed}.items()
        }
        share = statistics.fmean(one.receipt.cold_tokens / options.length for one in packed)
        predicted = (1 - share) * means["own"] + share * means["rung"]
        rows.append({"rung": rung, "cold_share": share, **means, "predicted": predicted})
        ratio = means["mix"] / predicted
        print(f"{options.kv} -> {rung}: {share:.0%} cold, KL {means['mix']:.5f}", end=", ")
        print(f"predicted {predicted:.5f}, ratio {ratio:.2f}")
    if options.json is not None:
        write_json(options.json, envelope(sys.argv, model.weights.device, rows))


if __name__ == "__main__":
    main()
