"""Other engines' KV on the same tokens, each beside its own unquantized KV; methods that kvq simulates."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from shutil import which
from typing import Any

from benchmarks.real.bench import Bench
from benchmarks.real.closeness import METHODS, compare, in_format, row_of, told
from benchmarks.real.records import Settings
from kvq.errors import ConfigError, EngineError, first_lines
from kvq.evals.watch import Progress

TRANSFORMERS = ("quanto-4", "quanto-2", "hqq-4", "hqq-2")
LLAMA = {"q8_0": 8.5, "q5_1": 6.0, "q4_0": 4.5}  # bits per element, scales included
SIMULATED = ("kivi-k4v4+recent=128", "kivi-k2v2+recent=128", "kvarn-k4v4", "kvarn-k2v2")
NAMES = (*TRANSFORMERS, *SIMULATED, *(f"llama.cpp-{name}" for name in LLAMA))  # what takes longest last
TOKENS = 2048
_PREFILL = 64  # tokens that QuantizedCache gets at once, and quantizes at once
_HOW = {
    "quanto": "transformers' logits, 8 tokens a step",
    "hqq": "transformers' logits, 8 tokens a step",
    "llama.cpp": "node-llama-cpp's probabilities of all tokens; from F16 KV",
}


def measure(bench: Bench, kv: str, settings: Settings, progress: Progress) -> dict[str, Any]:
    """One rival, or a format of kvq's, on the first windows of WikiText-2.

    Raises:
        ConfigError: its packages are not there.
        EngineError: its process failed.
    """
    windows = bench.windows(bench.lab.wikitext(), context=settings["context"], tokens=settings["tokens"])
    engine, _, rest = kv.partition("-")
    if kv in TRANSFORMERS:
        found = _transformers(bench, windows, engine, int(rest), progress)
    elif engine == "llama.cpp" and rest in LLAMA:
        found = _llama(bench, windows, rest, progress)
    else:
        how = "kvq's, of a method that it simulates" if kv.startswith(METHODS) else "kvq's"
        found = row_of(*compare(in_format(bench.model, kv), bench.baseline, windows, progress))
        return found | {"logits": how}
    return found | {"logits": _HOW[engine]}


def _transformers(
    bench: Bench, windows: list[list[int]], backend: str, bits: int, progress: Progress
) -> dict[str, Any]:
    packages = [_there(bench.lab.reader, "accelerate"), _there(bench.lab.rivals, "hqq")]
    asked = {
        "model": str(bench.prepared.folder),
        "windows": windows,
        "backend": backend,
        "bits": bits,
        "prefill": _PREFILL,
    }
    environment = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(map(str, packages)),
        "HF_HUB_OFFLINE": "1",
    }
    script = Path(__file__).with_name("run_transformers.py")
    found = _answer([sys.executable, str(script)], asked, environment, progress)
    held, bits_per_element = found.pop("bits_held"), found.pop("bits_per_element")
    return {"bits_per_element": bits_per_element, "bits_held_1024": held, **told(**found)}


def _llama(bench: Bench, windows: list[list[int]], kind: str, progress: Progress) -> dict[str, Any]:
    if kind not in bench.found_together:
        bench.found_together.update(_all_of_llama(bench, windows, progress))
    figures = bench.found_together[kind]
    return {"bits_per_element": LLAMA[kind], "bits_held_1024": LLAMA[kind], **told(**figures)}


def _all_of_llama(bench: Bench, windows: list[list[int]], progress: Progress) -> dict[str, Any]:
    """Every KV type in one run, beside one run of F16 KV."""
    node = which("node")
    if node is None:
        raise ConfigError("llama.cpp is run by node, which is not there; install Node.js 20 or later")
    modules = _there(bench.lab.node, "node-llama-cpp")
    asked = {
        "model": str(bench.lab.models / f"{bench.name}.gguf"),
        "modules": str(modules),
        "windows": windows,
        "types": [kind.upper() for kind in LLAMA],
        "threads": len(os.sched_getaffinity(0)),
        "vocabulary": bench.prepared.geometry.vocab_size,
    }
    script = Path(__file__).with_name("run_llama.mjs")
    return dict(zip(LLAMA, _answer([node, str(script)], asked, dict(os.environ), progress), strict=True))


def _there(folder: Path, package: str) -> Path:
    if not (folder / package).is_dir():
        raise ConfigError(f"{folder} has no {package}; run make real RIVALS=1")
    return folder


def _answer(
    command: list[str], asked: dict[str, Any], environment: dict[str, str], progress: Progress
) -> Any:
    """Send JSON to a process and return its answer; lines of two numbers on its stderr are progress."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )
    errors: list[str] = []

    def listen() -> None:
        assert child.stderr is not None
        for line in child.stderr:
            numbers = line.split()
            if len(numbers) == 2 and all(map(str.isdecimal, numbers)):
                progress(int(numbers[0]), int(numbers[1]))
            else:
                errors.append(line)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        with child.stdin:
            json.dump(asked, child.stdin)
        answer = child.stdout.read()
        listener.join()
        if child.wait():
            raise EngineError(f"{command[-1]} ended with {child.returncode}: {first_lines(_last(errors))}")
    finally:
        child.kill()
        child.wait()
    return json.loads(answer)


def _last(errors: list[str]) -> Exception:
    return RuntimeError(" ".join(errors[-3:]))
