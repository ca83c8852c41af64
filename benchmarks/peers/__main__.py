"""Measure kvq beside OpenVINO GenAI, llama.cpp and transformers on the CPU at hand; see docs/peers.md.

    python -m benchmarks.peers --model bench-model [--openvino PYTHON] [--llama PYTHON] [--models FOLDER] \\
        [--neighbours N] [--quota CORES] --json OUT.json

Every contender is a process of its own, stopped between its turns; these begin with the next one each time.
batch: 16 requests of 128 tokens in and 64 out. decode-128, decode-4096: one sequence at that depth. prefill:
2,048 tokens. Before any is timed, 64 greedy tokens of each are compared with those of kvq over fp32.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from shutil import which
from typing import Any

import torch

from benchmarks.peers.loads import PARTS, Contender
from benchmarks.peers.measure import Place, measure
from benchmarks.peers.neighbours import neighbours
from kvq.errors import ConfigError, KVQError
from kvq.evals.report.results import envelope, source_commit, write_json
from kvq.fileio import check_writable

_OWN = "auto"  # threads


def matching(patterns: str, names: Sequence[str], option: str) -> list[str]:
    """The names that any of the comma-separated patterns match, in their order.

    Raises:
        ConfigError: a pattern matches none.
    """
    found = set()
    for pattern in patterns.split(","):
        some = {name for name in names if fnmatchcase(name, pattern)}
        if not some:
            raise ConfigError(f"{option} {pattern!r} matches none of {', '.join(names)}")
        found |= some
    return [name for name in names if name in found]


def threads_of(text: str) -> tuple[int | None, ...]:
    """Numbers of threads to try.

    Raises:
        ConfigError: something else.
    """
    found = tuple(None if word == _OWN else int(word) if word.isdecimal() else 0 for word in text.split(","))
    if 0 in found or len(set(found)) < len(found):
        raise ConfigError(
            f"--threads takes different numbers from 1 on, or {_OWN}, such as 1,2; got {text!r}"
        )
    return found


def place_of(options: argparse.Namespace) -> Place:
    """Interpreters and models of those that take part.

    Raises:
        ConfigError: options that can't be used, before anything is measured.
    """
    if options.turns < 1 or options.neighbours < 0:
        raise ConfigError(
            f"--turns is at least 1 and --neighbours at least 0, got {options.turns} and {options.neighbours}"
        )
    if options.json is not None:
        check_writable(options.json)
    folder: Path | None = options.models
    pythons = dict.fromkeys(("kvq", "reference", "transformers"), sys.executable)
    models = {"kvq": options.model.resolve()}
    for engine, python in (("openvino", options.openvino), ("llama.cpp", options.llama)):
        if python is None:
            continue
        if which(python) is None:
            raise ConfigError(f"there is no interpreter {python!r} for {engine}; see docs/peers.md")
        pythons[engine] = python
    if folder is not None:
        models |= {f"openvino/{kind}": folder.resolve() / f"openvino-{kind}" for kind in ("fp32", "int8")}
        models |= {f"llama.cpp/{kind}": folder.resolve() / f"{kind}.gguf" for kind in ("f32", "q8_0", "q4_0")}
    elif len(pythons) > 3:
        raise ConfigError(
            "--openvino and --llama need --models, the folder of their models; see docs/peers.md"
        )
    return Place(pythons=pythons, models=models, threads=threads_of(options.threads), quota=options.quota)


def show(row: dict[str, Any]) -> None:
    """One line."""
    start = f"{row['part']:11s} {row['engine']:12s} {row['weights']:5s} {row['kv']:5s}"
    if row["reason"] is not None:
        print(f"{start} {row['reason'].splitlines()[-1]}")
        return
    itl = "" if row["itl_ms_p50"] is None else f"  ITL {row['itl_ms_p50']:.1f}, {row['itl_ms_p99']:.1f} ms"
    print(
        f"{start} {row['threads'] or _OWN} threads {row['tokens_per_s_median']:9,.1f} tokens/s "
        f"({row['tokens_per_s_p10']:,.1f} - {row['tokens_per_s_p90']:,.1f}){itl}  "
        f"{row['cpu_share_median']:.2f} cores  "
        f"{row['check_equal']} of {row['check_tokens']} tokens agree",
        flush=True,
    )


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="what tools/make_bench_model.py wrote")
    parser.add_argument("--openvino", help="an interpreter that has openvino-genai; else it takes no part")
    parser.add_argument("--llama", help="an interpreter that has llama-cpp-python; else it takes no part")
    parser.add_argument("--models", type=Path, help="folder of openvino-fp32/, openvino-int8/ and F.gguf")
    parser.add_argument("--parts", default="*", help=f"patterns, of {', '.join(PARTS)}")
    parser.add_argument("--only", default="*", help="patterns of ENGINE/WEIGHTS/KV: 'kvq/fp32/*,openvino/*'")
    parser.add_argument("--turns", type=int, default=8, help="of each contender (%(default)s)")
    parser.add_argument(
        "--threads",
        default=",".join(map(str, sorted({1, cores}))),
        help=f"numbers that each contender tries, to keep the fastest; {_OWN}: its own choice (%(default)s)",
    )
    parser.add_argument("--neighbours", type=int, default=0, help="busy processes beside all of it")
    parser.add_argument("--quota", type=float, help="cores that each contender's cgroup gives it")
    parser.add_argument("--json", type=Path, help="where to write the results, after each part")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Measure part by part.

    Raises:
        KVQError: options that can't be used, or a reference that fails.
    """
    options = options_of(arguments)
    source_commit()
    place = place_of(options)
    parts = matching(options.parts, list(PARTS), "--parts")
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    everybody = {one.name: one for part in PARTS.values() for one in part.contenders}
    chosen: set[Contender] = {everybody[name] for name in matching(options.only, list(everybody), "--only")}
    facts = {
        "model": f"{config['model_type']}, hidden size {config['hidden_size']}, "
        f"{config['num_hidden_layers']} layers",
        "turns": options.turns,
        "neighbours": options.neighbours,
        "quota_cores": options.quota,
        "cores": len(os.sched_getaffinity(0)),
        "loads": {name: PARTS[name].facts() for name in parts},
    }
    rows: list[dict[str, Any]] = []
    with neighbours(options.neighbours):
        for name in parts:
            part = PARTS[name]
            load = part.load(config["vocab_size"], config["max_position_embeddings"])
            some = [one for one in part.contenders if one in chosen and one.engine in place.pythons]
            found = measure(place, name, part, some, load, options.turns)
            for row in found:
                show(row)
            rows += found
            if options.json is not None:
                command = ["python", "-m", "benchmarks.peers", *arguments]
                write_json(options.json, envelope(command, torch.device("cpu"), rows, facts))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cgroups are removed after that, too
    try:
        main(sys.argv[1:])
    except (KVQError, OSError) as error:
        sys.exit(f"python -m benchmarks.peers: {error}")
