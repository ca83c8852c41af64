"""Make spec/exact.json: prompts, and the bits that exact engines give for them.

    python -m tools.make_exact_vectors          # of all variants of the C++ kernels that this machine runs
    python -m tools.make_exact_vectors --check  # compares what this machine gives with the file

Every entry of `results` is of one program, as receipts name it. For each KV format it has, by prompt, the
greedy tokens, their log-probabilities (doubles as C writes them in hex), and the receipt's digests. Other
engines can read the prompts and compare how their own results change with the batch, chunks and prefixes.
"""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kvq
from kvq.engine import LLM, SamplingParams
from kvq.kernels.native import library

PATH = Path(__file__).parents[1] / "spec" / "exact.json"
FORMATS = ("fp32", "int8", "fp8", "int4", "int4_g32_s8_rot/int4_g32_s8_rot", "int3_mean+sinks=4+recent=32")
LENGTHS = (1, 15, 16, 17, 63, 130)  # tokens of the prompts, in blocks of 16
TOKENS = 16  # of an answer


def prompts() -> list[list[int]]:
    """Return token ids between 3 and 4,095, from a linear congruential generator that anyone can write."""
    found, state = [], 1
    for length in LENGTHS:
        tokens = []
        for _ in range(length):
            state = (1103515245 * state + 12345) % (1 << 31)
            tokens.append(3 + (state >> 8) % 4093)
        found.append(tokens)
    return found


def results() -> tuple[str, dict[str, Any]]:
    """Return this process's program, and its results by format."""
    params = SamplingParams(max_tokens=TOKENS, logprobs=0, ignore_eos=True)
    model, found, program = kvq.load("tiny", device="cpu", dtype="fp32", block_size=16, exact=True), {}, ""
    for kv in FORMATS:
        with LLM(model, kv, num_blocks=128) as llm:
            outputs = llm.generate(prompts(), params)
        rows = []
        for output in outputs:
            exact, (one,) = output.receipt.exact, output.outputs
            assert exact is not None, "the engine is exact"
            assert one.logprobs is not None, "requested"
            program = exact.program
            logprobs = [entry.logprob.hex() for entry in one.logprobs]
            digests = {"recipe": exact.recipe, "kv": exact.kv[0], "trace": exact.tokens[0]}
            rows.append({"tokens": one.token_ids, "logprobs": logprobs} | digests)
        found[kv] = rows
    return program, found


def main() -> None:
    logging.getLogger("kvq").setLevel(logging.ERROR)
    built = library.variants()
    if isinstance(built, str):
        sys.exit(built)
    if sys.argv[1:2] == ["--variant"]:
        with patch.object(library, "variants", lambda: [x for x in built if x.variant == sys.argv[2]]):
            print(json.dumps(results()))
        return
    if sys.argv[1:2] == ["--check"]:
        program, found = results()
        known = json.loads(PATH.read_text())["results"]
        if program not in known:
            sys.exit(f"{PATH} has no results of {program}, only of {', '.join(known)}")
        sys.exit(None if known[program] == found else f"the results of {program} differ from {PATH}")
    everything = {}
    for one in built:
        words = [sys.executable, "-m", "tools.make_exact_vectors", "--variant", one.variant]
        run = subprocess.run(words, check=True, capture_output=True, text=True)
        program, found = json.loads(run.stdout.splitlines()[-1])
        everything[program] = found
    given = {"model": "tiny", "block_size": 16, "max_tokens": TOKENS, "temperature": 0, "prompts": prompts()}
    PATH.write_text(json.dumps(given | {"results": everything}, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
