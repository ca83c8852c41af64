"""What the guard costs a busy engine: tokens per second with and without it, interleaved.

    python -m benchmarks.guard [--model tiny] [--rounds 12] [--out FILE]

Every round, each engine answers the same requests, which keep it busy to the end, so that the guard has no
idle time. Processor time of this process with one thread, so that other processes matter little.
"""

import argparse
import os
import random
import sys
import time
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from kvq import LLM, SamplingParams, load
from kvq.evals.report.results import envelope, write_json

REQUESTS, TOKENS, NEW = 96, 160, 96
SHARES = (0.0, 0.01, 0.1, 1.0)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--kv", default="int4")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out")
    given = parser.parse_args()
    model = load(given.model, kv=given.kv)
    engines = {
        share: LLM(model, guard=share, num_blocks=1024, max_num_seqs=16, max_num_batched_tokens=512)
        for share in SHARES
    }
    seconds: dict[float, list[float]] = {share: [] for share in SHARES}
    texts: dict[float, list[Any]] = {share: [] for share in SHARES}
    for number in range(given.rounds + 1):  # the first one warms up
        order = list(SHARES)
        random.Random(number).shuffle(order)
        for share in order:
            spent, made = _round(engines[share], number, model.geometry.vocab_size)
            texts[share].append(made)
            if number:
                seconds[share].append(spent)
    assert all(texts[share] == texts[0.0] for share in SHARES), "the guard changes no answer"
    rows = []
    for share in SHARES:
        ratios = sorted(b / a for a, b in zip(seconds[share], seconds[0.0], strict=True))
        totals = engines[share].core.upkeep.guard
        rows.append(
            {
                "guard": share,
                "speed": median(ratios),  # tokens per second, of those without it
                "speed_p10_p90": [ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]],
                "compared": 0 if totals is None else totals.totals.requests,
                "requests": (given.rounds + 1) * REQUESTS,
            }
        )
        print(rows[-1])
    if given.out:
        about = {"model": given.model, "kv": given.kv, "threads": torch.get_num_threads()}
        write_json(given.out, envelope(sys.argv, torch.device("cpu"), rows, about))


def _round(llm: LLM, number: int, vocab: int) -> tuple[float, list[Any]]:
    """Answer a round's requests; return the processor time and the tokens."""
    source = random.Random(number)
    prompts = [[source.randrange(vocab // 2) for _ in range(TOKENS)] for _ in range(REQUESTS)]
    params = SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0.0)
    began = time.process_time()
    outputs = llm.generate(prompts, params)
    return time.process_time() - began, [one.outputs[0].token_ids for one in outputs]


if __name__ == "__main__":
    main()
