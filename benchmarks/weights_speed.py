"""Time to quantize one Linear layer, and memory beyond its weight and Hessian.

    OMP_NUM_THREADS=2 python benchmarks/weights_speed.py --json OUT.json

Every method runs in a process of its own, so that peaks of memory are its own. Checked first: GPTQ and
AWQ must change the outputs less than rounding does.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import click
import torch

from kvq.evals.report.results import envelope, source_commit, write_json
from kvq.formats.weights import parse_weight_format
from kvq.weights import round_weight
from kvq.weights.channel_scales import awq_scales
from kvq.weights.gptq import GPTQOptions, gptq
from kvq.weights.rounding import clip_weight
from kvq.weights.statistics import InputStatistics

GPTQ = {
    "gptq": GPTQOptions(search="weighted"),
    "gptq, plain ranges": GPTQOptions(),
    "gptq, act-order": GPTQOptions(search="weighted", order="static"),
}
METHODS = ("rtn", *GPTQ, "awq")


def peak_bytes() -> int:
    """Most memory this process had in RAM."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(method: str, size: int, name: str, repeats: int) -> dict[str, Any]:
    """One method on one layer, in this process."""
    fmt, generator = parse_weight_format(name), torch.Generator().manual_seed(0)
    weight = torch.randn(size, size, generator=generator) * 0.02
    seen = InputStatistics("layer", size, weight.device)
    spread = torch.exp(torch.randn(size, generator=generator))
    began = time.perf_counter()
    for _ in range(4):
        x = torch.randn(1024, size, generator=generator) * spread
        x[:, 1:] += 0.5 * x[:, :-1]
        seen.add(x)
    seen_seconds = time.perf_counter() - began
    before, seconds = peak_bytes(), []
    for _ in range(repeats):
        began = time.perf_counter()
        if method == "rtn":
            stored = round_weight(weight, fmt).dequantize()
        elif method == "awq":
            chosen = awq_scales([weight], seen, fmt, torch.float32)
            scaled = weight * chosen.scale
            gram = seen.gram / chosen.scale / chosen.scale[:, None]
            stored = clip_weight(scaled, fmt, torch.float32, gram).dequantize() / chosen.scale
        else:
            stored = gptq(weight, seen.gram, fmt, options=GPTQ[method], dtype=torch.float32).dequantize()
        seconds.append(time.perf_counter() - began)
    error, rounded = (
        seen.relative_error(weight, x) for x in (stored, round_weight(weight, fmt).dequantize())
    )
    if method != "rtn" and error >= rounded:
        raise SystemExit(f"{method} changes outputs by {error:.4f}, rounding by {rounded:.4f}")
    return {
        "name": method,
        "format": name,
        "out_features": size,
        "in_features": size,
        "seconds_median": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "repeats": repeats,
        "statistics_seconds_per_1024_tokens": seen_seconds / 4,
        "peak_bytes_beyond_inputs": peak_bytes() - before,
        "relative_error": error,
        "relative_error_rtn": rounded,
    }


@click.command()
@click.option("--size", default=4096, show_default=True, help="Inputs and outputs.")
@click.option("--format", "name", default="int4", show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--only", type=click.Choice(METHODS), help="One method, its row printed.")
@click.option("--json", "json_path")
def main(size: int, name: str, repeats: int, only: str | None, json_path: str | None) -> None:
    """Measure all methods."""
    if only is not None:
        click.echo(json.dumps(measure(only, size, name, repeats)))
        return
    source_commit()
    rows = []
    for method in METHODS:
        words = [
            sys.executable,
            __file__,
            "--size",
            size,
            "--format",
            name,
            "--repeats",
            repeats,
            "--only",
            method,
        ]
        run = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True)
        rows.append(json.loads(run.stdout))
        click.echo(rows[-1])
    if json_path is not None:
        write_json(json_path, envelope(sys.argv, torch.device("cpu"), rows))


if __name__ == "__main__":
    main()
