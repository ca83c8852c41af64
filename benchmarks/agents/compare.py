"""Compare checkouts and options of the engine on an agent trace, run in turn, each in its own process.

    python -m benchmarks.agents.compare --trace trace.jsonl --model DIR --repeats 2 --json result.json \
        --variant before ../before '{"kv": "int8"}' --variant after . '{"kv": "int8", "kv_host": "2GiB"}'

A variant is a name, the checkout whose kvq runs, and the engine's options. In every repeat all variants run,
beginning with the next one each time. Greedy answers of all runs are compared; where the two most likely
tokens are nearly alike, rounding may exchange them from one batch to the next, so for each difference the
first checkout computes how much likelier its token was. More than rounding explains ends the comparison with
an error. `"exact": true` among the options makes all answers equal.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.agents.replay import show, summary
from kvq.bench.engine.rivals import first_difference
from kvq.bench.timing import in_turn
from kvq.evals.report.results import envelope, write_json

ROOT = Path(__file__).parents[2]
NEAR = 0.2  # of log-probabilities, which rounding may invert between batches in 16 bits
_START = (  # kvq from the checkout, this package from here
    "import sys, kvq; sys.path.insert(0, sys.argv.pop(1)); import benchmarks; "
    "from benchmarks.agents.{module} import main; main()"
)
Run = dict[str, Any]


class Variant(NamedTuple):
    """What is compared."""

    name: str
    checkout: str
    options: str


def started(variant: Variant, module: str, arguments: Sequence[str]) -> None:
    """Run a module of this package with the kvq of a variant's checkout.

    Raises:
        SystemExit: it failed, or the checkout has no kvq.
    """
    checkout = Path(variant.checkout).resolve()
    if not (checkout / "kvq" / "__init__.py").is_file():
        raise SystemExit(f"{variant.name}: {checkout} has no kvq")
    command = [sys.executable, "-P", "-c", _START.format(module=module), str(ROOT), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    ended = subprocess.run(command, env=environment, cwd=checkout, check=False)
    if ended.returncode:
        raise SystemExit(f"{variant.name}: {module} ended with {ended.returncode}")


def run_all(given: argparse.Namespace, variants: Sequence[Variant], folder: Path) -> dict[str, list[Run]]:
    """Run all variants in turn, and return the results of each."""
    found: dict[str, list[Run]] = {variant.name: [] for variant in variants}
    for repeat, variant in in_turn(variants, given.repeats):
        path = folder / f"{variant.name}-{repeat}.json"
        started(variant, "replay", [*_shared(given), "--options", variant.options, "--json", str(path)])
        run = json.loads(path.read_text(encoding="utf-8"))
        show(f"{variant.name}, repeat {repeat}", run["rows"][0])
        found[variant.name].append(run)
    return found


def _shared(given: argparse.Namespace) -> list[str]:
    text = [] if given.text is None else ["--text", str(given.text.resolve())]
    model = str(Path(given.model).resolve()) if Path(given.model).exists() else given.model
    return ["--trace", str(given.trace.resolve()), "--model", model, "--demand", str(given.demand), *text]


def differences(first: Run, other: Run) -> list[dict[str, Any]]:
    """Return where answers of two runs differ: the turn, the tokens before, and the first run's token."""
    known = {(row["session"], row["turn"]): row["token_ids"] for row in first["turns"]}
    found = []
    for row in other["turns"]:
        expected = known[row["session"], row["turn"]]
        at = first_difference(expected, row["token_ids"])
        if at is not None:
            found.append(
                {
                    "session": row["session"],
                    "turn": row["turn"],
                    "before": expected[:at],
                    "expected": expected[at : at + 1],
                    "found": row["token_ids"][at : at + 1],
                }
            )
    return found


def compared(
    given: argparse.Namespace, variants: Sequence[Variant], runs: Mapping[str, list[Run]], folder: Path
) -> dict[str, Any]:
    """Compare all answers with those of the first run, and count those that rounding does not explain."""
    every = [run for variant in variants for run in runs[variant.name]]
    turns, asked = len(every[0]["turns"]), dict[str, dict[str, Any]]()
    counts = []
    for run in every[1:]:
        found = differences(every[0], run)
        counts.append(len(found))
        asked.update({json.dumps(one): one for one in found})
    gaps: list[float] = []
    if asked:
        paths = folder / "asked.json", folder / "gaps.json"
        paths[0].write_text(json.dumps(list(asked.values())), encoding="utf-8")
        arguments = ["--asked", str(paths[0]), "--json", str(paths[1])]
        started(variants[0], "gaps", [*_shared(given), "--options", variants[0].options, *arguments])
        gaps = json.loads(paths[1].read_text(encoding="utf-8"))
    return {
        "turns": turns,
        "runs_compared": len(every),
        "different_turns": counts,
        "largest_gap": max(gaps, default=None),
        "wrong": sum(gap > NEAR for gap in gaps),
    }


def rows(variants: Sequence[Variant], runs: Mapping[str, list[Run]]) -> list[dict[str, Any]]:
    """Return a row for each variant: medians of all figures, and all runs."""
    found = []
    for variant in variants:
        each = [summary(run["turns"]) for run in runs[variant.name]]
        medians = {
            name: statistics.median(one[name] for one in each)
            for name in each[0]
            if all(one[name] is not None for one in each)
        }
        names = ("commit", "kv", "pool_blocks", "demand_blocks")
        facts = {name: runs[variant.name][0][name] for name in names}
        peak = max(run["peak_rss_bytes"] for run in runs[variant.name])
        cpu_s = [run["cpu_s"] for run in runs[variant.name]]
        found.append(
            {
                "variant": variant.name,
                "options": json.loads(variant.options),
                **facts,
                "peak_rss_bytes": peak,
                "cpu_s": statistics.median(cpu_s),
                **medians,
                "runs": each,
            }
        )
    return found


def main() -> None:
    """Run, compare, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--variant", nargs=3, action="append", required=True, metavar=("NAME", "CHECKOUT", "OPTIONS")
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--demand", type=float, default=4.0)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    variants = [Variant(*one) for one in given.variant]
    if len({variant.name for variant in variants}) < len(variants):
        raise SystemExit("variants must have different names")
    with tempfile.TemporaryDirectory(prefix="kvq-compare-") as folder:
        runs = run_all(given, variants, Path(folder))
        check = compared(given, variants, runs, Path(folder))
    found = rows(variants, runs)
    first = found[0]
    for row in found:
        show(row["variant"], row)
        if row is not first:
            print(
                f"{row['variant']} / {first['variant']}: tokens/s "
                f"{row['tokens_per_s'] / first['tokens_per_s']:.2f}, TTFT p95 "
                f"{row['ttft_p95_s'] / first['ttft_p95_s']:.2f}, "
                f"mean {row['ttft_mean_s'] / first['ttft_mean_s']:.2f}"
            )
    print(
        f"answers that differ from the first run's: {check['different_turns']} of {check['turns']} turns; "
        f"largest gap {check['largest_gap']}"
    )
    if given.json is not None:
        command = ["python", "-m", "benchmarks.agents.compare", *sys.argv[1:]]
        write_json(given.json, envelope(command, torch.device("cpu"), found, {"answers": check}))
    if check["wrong"]:
        raise SystemExit(f"{check['wrong']} answers differ by more than rounding explains")


if __name__ == "__main__":
    main()
