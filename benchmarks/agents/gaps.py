"""How much likelier a token was than one that another run chose in its place; run by `compare`.

    python -m benchmarks.agents.gaps --trace trace.jsonl --model DIR --asked asked.json --json gaps.json

Each prompt with the tokens before the difference runs alone, without prefix caching.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.agents.replay import opened, prompts
from benchmarks.agents.trace import read_trace
from kvq.engine import LLM, SamplingParams

_TOP = 20  # tokens whose log-probabilities are looked at


def gap(llm: LLM, prompt: list[int], one: dict[str, Any]) -> float:
    """Return how far the less likely of two tokens is below the likeliest one, in log-probability."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=_TOP)
    entry = llm.generate([prompt + one["before"]], params)[0].outputs[0].logprobs[0]  # type: ignore[index]
    top = dict(entry.top)
    tokens = [*one["expected"], *one["found"]]
    if len(tokens) < 2 or not all(token in top for token in tokens):
        return 1e9
    return max(entry.logprob, *top.values()) - min(top[token] for token in tokens)


def main() -> None:
    """Compute the gaps of all differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--options", default="{}")
    parser.add_argument("--demand", help="taken and not used")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--asked", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    trace = read_trace(given.trace)
    options = json.loads(given.options)
    model, tokens = opened(given.model, options, given.text)
    known = prompts(trace, tokens)
    asked = json.loads(given.asked.read_text(encoding="utf-8"))
    with LLM(model, max_num_seqs=1, prefix_caching=False) as llm:
        found = [gap(llm, known[one["session"], one["turn"]], one) for one in asked]
    given.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
