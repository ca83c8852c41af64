"""Decoding over the experts of a mixture in several formats.

    python tools/make_bench_model.py --out mixture --experts
    python benchmarks/experts_decode.py --model mixture --json OUT.json

Every contender decodes `--tokens` tokens after a prompt of `--depth`, in turn, `--repeats` times; `left` over
fp32 experts that are left to transformers' code.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch

import kvq
from kvq.bench.timing import in_turn, percentile
from kvq.evals.report.results import envelope, source_commit, write_json
from kvq.weights import weight_bytes

LEFT = "left"  # weights as stored, the experts in transformers' code
WEIGHTS = (LEFT, "auto", "int8", "int4")


def load(model: str, weights: str) -> kvq.LLM:
    """An engine; of LEFT one that finds no stacked experts to take over."""
    unknown = mock.patch("kvq.models.parts.linear.stacked_experts", return_value={})
    with unknown if weights == LEFT else nullcontext():
        weights = "auto" if weights == LEFT else weights
        return kvq.LLM(model, kv="fp32", weights=weights, kv_memory="256MiB", prefix_caching=False)


def engine(
    model: str, weights: str, depth: int, tokens: int, sequences: int
) -> tuple[Callable[[], float], dict[str, Any]]:
    """Tokens a second of one turn of kvq's engine, and what its weights take."""
    llm = load(model, weights)
    prompt = [[5 + (i + 37 * j) % 4000 for i in range(depth)] for j in range(sequences)]

    def seconds(count: int) -> float:
        began = time.perf_counter()
        llm.generate(prompt, kvq.SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0))
        return time.perf_counter() - began

    seconds(4)
    return lambda: sequences * tokens / (seconds(tokens + 2) - seconds(2)), {
        "weights_bytes": weight_bytes(llm.model.weights.model),
        "model": llm.model.description.partition(", weights in ")[0],
    }


@click.command()
@click.option("--model", required=True, help="The folder that tools/make_bench_model.py wrote.")
@click.option("--depth", default=128, show_default=True, help="Tokens before the first decoded one.")
@click.option("--tokens", default=64, show_default=True, help="Decoded in a turn.")
@click.option("--repeats", default=15, show_default=True)
@click.option("--sequences", default=1, show_default=True, help="Decoded together.")
@click.option("--weights", default=",".join(WEIGHTS), show_default=True, help="Formats.")
@click.option("--json", "json_path")
def main(
    model: str,
    depth: int,
    tokens: int,
    repeats: int,
    sequences: int,
    weights: str,
    json_path: str | None,
) -> None:
    """Measure all of them in turn."""
    source_commit()
    turns = {name: engine(model, name, depth, tokens, sequences) for name in weights.split(",")}
    found: dict[str, list[float]] = {name: [] for name in turns}
    for _, name in in_turn(list(turns), repeats):
        found[name].append(turns[name][0]())
    medians = {name: percentile(values, 50) for name, values in found.items()}
    rows = []
    for name, values in found.items():
        rows.append(
            {
                "name": "kvq",
                "weights": name.replace("auto", "fp32"),
                "tokens_per_s_median": medians[name],
                "tokens_per_s_p10": percentile(values, 10),
                "tokens_per_s_p90": percentile(values, 90),
                "over_left": medians[name] / medians[LEFT] if LEFT in medians else None,
                **turns[name][1],
            }
        )
        click.echo(rows[-1])
    if json_path is not None:
        more = {"model": Path(model).name, "depth": depth, "tokens": tokens, "repeats": repeats}
        described = [row.pop("model") for row in rows if "model" in row]
        more |= {"sequences": sequences, "described": described[0].replace(",", " of", 1)}
        write_json(json_path, envelope(["benchmarks/experts_decode.py"], torch.device("cpu"), rows, more))


if __name__ == "__main__":
    main()
