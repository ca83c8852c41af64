"""Loading time of a checkpoint on a CPU, its parts, and the memory it takes meanwhile.

    python -m benchmarks.loading [--model FOLDER or x.gguf] [--repeats 5] [--json FILE]

Every load is a process of its own: `kvq.load` after torch and transformers' code for the family were
imported, until one token was computed. Without --model a bf16 Llama of 1 GB with random weights is written
first. The files are read once before, so they come from the page cache. "kvq" and the same without its way
straight from the file ("transformers") come in turn. Peaks are of anonymous memory, sampled every
millisecond, and beside it of all that is resident, which counts pages of the mapped file too. A GGUF file
is loaded by kvq only, after its header and its tokenizer were read.
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
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from kvq.evals.report.results import envelope, write_json
from kvq.models import load, model
from kvq.models.describe import modules
from kvq.models.describe.checkpoint import content_digest, is_gguf, read_config_json, weight_files
from kvq.models.loading import prepared, weights

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1536,
    "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 12, "num_key_value_heads": 4,
    "head_dim": 128, "vocab_size": 32_000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WAYS = ("kvq", "transformers")
DIGEST = "digest, beside"
STAGES = {  # in their order; the digest is another thread's
    "config and headers": (model, "prepare"),
    "skeleton": (weights, "build_skeleton"),
    "read and pack": (weights, "fill"),
    "transformers' loader": (weights, "load_module"),
    "rest of the modules": (weights, "settle"),
    "check against its own attention": (model, "probe_layers"),
    DIGEST: (prepared, "content_digest"),
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


def _timed(run: Callable[..., Any], name: str, stages: dict[str, dict[str, float]]) -> Callable[..., Any]:
    """Seconds, and those of the processors in all threads; of the digest in its own alone."""
    spent = time.thread_time if name == DIGEST else time.process_time

    def timed(*args: Any, **given: Any) -> Any:
        began, before = time.perf_counter(), spent()
        try:
            return run(*args, **given)
        finally:
            stages[name] = {"s": time.perf_counter() - began, "processor_s": spent() - before}

    return timed


def load_once(folder: Path, way: str) -> dict[str, Any]:
    """Load in this process."""
    modules.import_class(read_config_json(folder))
    torch.empty(1)
    if is_gguf(folder):
        _ = prepared.prepare(folder, device="cpu").tokenizer
    stages: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        if way == "transformers":
            stack.enter_context(patch.object(weights, "fill", lambda *_: None))
        for name, (module, own) in STAGES.items():
            stack.enter_context(patch.object(module, own, _timed(getattr(module, own), name, stages)))
        anonymous, resident = _resident()
        with _peaks() as most:
            began, before = time.perf_counter(), time.process_time()
            loaded = load(folder, device="cpu")
            logits = loaded.logits([1])
            took, spent = time.perf_counter() - began, time.process_time() - before
            digest = loaded.weights.digest
        stays = _resident()
    assert logits.isfinite().all(), "the model gives numbers"
    return {
        "way": way,
        "load_s": took,
        "load_processor_s": spent,
        "stages": stages,
        "peak_of_what_stays": (most[0] - anonymous) / (stays[0] - anonymous),
        "anonymous_peak_bytes": most[0] - anonymous,
        "anonymous_stays_bytes": stays[0] - anonymous,
        "resident_peak_bytes": most[1] - resident,
        "resident_stays_bytes": stays[1] - resident,
        "digest": digest,
        "logits": float(logits.double().sum()),
    }


def measured(folder: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """All ways in turn, each in a process of its own; the same digest and the same logits every time."""
    digest = content_digest(weight_files(folder))  # which reads all files
    logits = set()
    for _ in range(repeats):
        for way in WAYS[:1] if is_gguf(folder) else WAYS:
            command = [sys.executable, "-m", "benchmarks.loading", "--model", str(folder), "--once", way]
            row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            logits.add(row.pop("logits"))
            if row["digest"] != digest or len(logits) > 1:
                raise SystemExit(f"{way}: another model was loaded than before")
            yield row


def _median(rows: list[dict[str, Any]], way: str, value: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(value(row) for row in rows if row["way"] == way)


def show(rows: list[dict[str, Any]]) -> None:
    """Medians of all ways."""
    ways = [way for way in WAYS if any(row["way"] == way for row in rows)]
    print(f"{'medians: seconds, of processors':36}" + "".join(f"{way:>17}" for way in ways))

    def line(name: str, *values: Callable[[dict[str, Any]], float]) -> None:
        cells = (" ".join(f"{_median(rows, way, value):8.3f}" for value in values) for way in ways)
        print(f"{name:36}" + "".join(cell.rjust(17) for cell in cells))

    line("until the first token", lambda row: row["load_s"], lambda row: row["load_processor_s"])
    for name in STAGES:
        kinds = (partial(_of_stage, name=name, kind=kind) for kind in ("s", "processor_s"))
        line(f"  {name}", *kinds)
    line("peak of what stays, anonymous", lambda row: row["peak_of_what_stays"])
    line("stays, anonymous, MB", lambda row: row["anonymous_stays_bytes"] / 1e6)
    line("peak, all resident, MB", lambda row: row["resident_peak_bytes"] / 1e6)


def _of_stage(row: dict[str, Any], *, name: str, kind: str) -> float:
    return float(row["stages"].get(name, {}).get(kind, 0.0))


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
            "config": read_config_json(folder),
        }
    show(rows)
    if options.json:
        write_json(
            options.json,
            envelope(["python -m benchmarks.loading", *sys.argv[1:]], torch.device("cpu"), rows, about),
        )


if __name__ == "__main__":
    main()
