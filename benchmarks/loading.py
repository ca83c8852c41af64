"""How long a checkpoint takes to load on a CPU, where the time goes, and what memory it takes meanwhile.

    python -m benchmarks.loading [--model FOLDER] [--repeats 5] [--json FILE]

Every load is a process of its own: `kvq.load` after torch and transformers' code for the family were imported,
until one token was computed. Without --model a bf16 Llama of 1 GB with random weights is written first. The
files are read once before, so they come from the page cache. "kvq" and the same without its way straight from the
file ("transformers") come in turn. Peaks are of anonymous memory, sampled every millisecond, and beside it of all
that is resident, which counts pages of the mapped file too.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from kvq.evals.results import envelope, write_json
from kvq.models import load, model, modules, prepared, weights
from kvq.models.checkpoint import content_digest, read_json, weight_files

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1536, "intermediate_size": 4096,
    "num_hidden_layers": 16, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 32_000, "max_position_embeddings": 4096, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
WAYS = ("kvq", "transformers")
STAGES = {  # in their order; the digest is another thread's, beside them
    "config and headers": (model, "prepare"),
    "skeleton": (weights, "build_skeleton"),
    "read and pack": (weights, "fill"),
    "transformers' loader": (weights, "load_module"),
    "rest of the modules": (weights, "settle"),
    "check against its own attention": (model, "probe_layers"),
    "digest, beside": (prepared, "content_digest"),
}
SAMPLED_EVERY_S = 0.001


def write_model(folder: Path) -> Path:
    """A bf16 checkpoint of 1 GB."""
    module = modules.build_random(LLAMA, torch.bfloat16, torch.device("cpu"))
    module.save_pretrained(folder)
    return folder


def _resident() -> tuple[int, int]:
    """Anonymous memory of this process, and all of it; bytes."""
    found = {}
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(("RssAnon:", "VmRSS:")):
                name, kilobytes, _ = line.split()
                found[name] = int(kilobytes) * 1024
    return found["RssAnon:"], found["VmRSS:"]


@contextmanager
def _peaks() -> Iterator[list[int]]:
    """The most of both, kept up to date."""
    most, done = list(_resident()), threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLED_EVERY_S):
            most[:] = map(max, most, _resident())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def _timed(run: Callable[..., Any], name: str, seconds: dict[str, float]) -> Callable[..., Any]:
    def timed(*args: Any, **given: Any) -> Any:
        began = time.perf_counter()
        try:
            return run(*args, **given)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

    return timed


def load_once(folder: Path, way: str) -> dict[str, Any]:
    """Load in this process."""
    modules.import_class(read_json(folder / "config.json"))
    torch.empty(1)
    seconds: dict[str, float] = {}
    with ExitStack() as stack:
        if way == "transformers":
            stack.enter_context(patch.object(weights, "fill", lambda *_: None))
        for name, (module, own) in STAGES.items():
            stack.enter_context(patch.object(module, own, _timed(getattr(module, own), name, seconds)))
        anonymous, resident = _resident()
        with _peaks() as most:
            began = time.perf_counter()
            loaded = load(folder, device="cpu")
            logits = loaded.logits([1])
            took = time.perf_counter() - began
            digest = loaded.weights.digest
        stays = _resident()
    assert logits.isfinite().all(), "the model gives numbers"
    return {
        "way": way,
        "load_s": took,
        "stages_s": seconds,
        "peak_of_what_stays": (most[0] - anonymous) / (stays[0] - anonymous),
        "anonymous_peak_bytes": most[0] - anonymous,
        "anonymous_stays_bytes": stays[0] - anonymous,
        "resident_peak_bytes": most[1] - resident,
        "resident_stays_bytes": stays[1] - resident,
        "digest": digest,
        "logits": float(logits.double().sum()),
    }


def measured(folder: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """Both ways in turn, each in a process of its own; the same digest and the same logits every time."""
    digest = content_digest(weight_files(folder))  # which reads all files
    logits = set()
    for _ in range(repeats):
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.loading", "--model", str(folder), "--once", way]
            row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            logits.add(row.pop("logits"))
            if row["digest"] != digest or len(logits) > 1:
                raise SystemExit(f"{way}: another model was loaded than before")
            yield row


def _median(rows: list[dict[str, Any]], way: str, value: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(value(row) for row in rows if row["way"] == way)


def show(rows: list[dict[str, Any]]) -> None:
    """Medians of both ways."""
    print(f"{'medians':36}" + "".join(f"{way:>14}" for way in WAYS))
    lines: dict[str, Callable[[dict[str, Any]], float]] = {
        "until the first token, s": lambda row: row["load_s"],
        **{f"  {name}, s": lambda row, name=name: row["stages_s"].get(name, 0.0) for name in STAGES},  # type: ignore[misc]
        "peak of what stays, anonymous": lambda row: row["peak_of_what_stays"],
        "stays, anonymous, MB": lambda row: row["anonymous_stays_bytes"] / 1e6,
        "peak, all resident, MB": lambda row: row["resident_peak_bytes"] / 1e6,
    }
    for name, value in lines.items():
        print(f"{name:36}" + "".join(f"{_median(rows, way, value):14.3f}" for way in WAYS))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="the folder to load")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument("--once", choices=WAYS, help="load once in this process, and say it in JSON")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(load_once(options.model, options.once)))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = options.model or write_model(Path(made))
        rows = list(measured(folder, options.repeats))
        about = {
            "stored_bytes": sum(path.stat().st_size for path in weight_files(folder)),
            "config": read_json(folder / "config.json"),
        }
    show(rows)
    if options.json:
        write_json(
            options.json,
            envelope(["python -m benchmarks.loading", *sys.argv[1:]], torch.device("cpu"), rows, about),
        )


if __name__ == "__main__":
    main()
