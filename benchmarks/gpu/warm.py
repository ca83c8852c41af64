"""Kernels compiled by many processes at once, with the launches that are measured later.

    python3 -m benchmarks.gpu.warm SHARE OF --device cuda --folder F

Each process launches its share of all shapes once and prints a line of JSON for each; what is compiled lies
in the cache that all share.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.gpu import attention, linear
from benchmarks.gpu.case import Case, Rows, Target

ROOT = Path(__file__).resolve().parents[2]
_BATCH = 64  # work lists of many sequences are other machine code than those of few
_LEFT_S = 10.0  # of the case's time, to write down what was done


def cases(target: Target) -> Iterator[Case]:
    """One, which ends when all shares have ended or its time is over."""
    limit_s = 110.0
    yield Case(name="warm", run=lambda: warmed(target, limit_s - _LEFT_S), limit_s=limit_s)


def warmed(target: Target, limit_s: float) -> Rows:
    """Return the time of every launch with its compilation; those that failed have a reason."""
    count = target.pick(min(16, os.cpu_count() or 1), 2)
    ends_at = time.monotonic() + limit_s
    files = [target.folder / f"warm-{i}.jsonl" for i in range(count)]
    processes = [_share(target, i, count, file) for i, file in enumerate(files)]
    for process in processes:
        try:
            process.wait(max(0.0, ends_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines() if line[-1:] == "}"]
    names = [name for name, _ in launches(target)]
    done = {row["launch"] for row in rows}
    return [*rows, *({"launch": name, "error": "not reached"} for name in names if name not in done)]


def _share(target: Target, share: int, count: int, file: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "benchmarks.gpu.warm", str(share), str(count)]
    command += ["--device", target.device, "--folder", str(target.folder)]
    with file.open("wb") as out:
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=out)


def launches(target: Target) -> list[tuple[str, Callable[[], object]]]:
    """Everything that the other parts launch, once."""
    shapes = [
        *attention.decode_shapes(target),
        *attention.extend_shapes(target),
        *attention.long_shapes(target)[:1],
        *attention.write_shapes(target),
    ]
    found: list[tuple[str, Callable[[], object]]] = [
        (f"{model} engine, {kv}", lambda m=model, kv=kv: _engine(target, m, kv))
        for model in ("small", "large")
        for kv in ("bf16", "int4", "fp8")
    ]
    found += [
        (f"{shape.name}, {kv}", lambda s=shape, kv=kv: _attend(target, s, kv))
        for shape in shapes
        for kv in shape.formats
    ]
    layers = target.pick(linear.SHAPES, ((256, 48),))
    found += [
        (f"linear {shape}, {rows} rows, {kind}", lambda s=shape, r=rows, k=kind: _multiply(target, s, r, k))
        for shape in layers
        for rows in target.pick(linear.ROWS, (1,))
        for kind in linear.WEIGHTS
    ]
    return found


def _attend(target: Target, shape: attention.Shape, kv: str) -> None:
    from kvq.bench.kernels.attention import fused, over_blocks

    workload = shape.workload(target)
    own, cache, batch = over_blocks(workload, kv)
    own.check()
    if shape.new > 1:
        fused(workload, own, cache, batch).check()


def _multiply(target: Target, shape: tuple[int, int], rows: int, kind: str) -> None:
    from kvq.bench.kernels.linear import over_codes

    over_codes(linear.workload(target, shape, rows), kind).check()


def _engine(target: Target, name: str, kv: str) -> None:
    """A layer of the model in an engine: prefill, decode steps, and what they are captured as."""
    from benchmarks.gpu import models
    from benchmarks.gpu.engine_steps import bench_steps

    own = Target(device=target.device, folder=target.folder / f"warm-{name}-{kv}", out=target.out)
    model = models.model(own, name, num_hidden_layers=1)
    bench_steps(model, kv, batch=target.pick(_BATCH, 2), context=70, read_gb_per_s=1.0, steps=2)


def _give_back(target: Target) -> None:
    """Leave the device's memory to the other processes."""
    gc.collect()
    if not target.is_rehearsal:
        import torch

        torch.cuda.empty_cache()


def main() -> None:
    """Launch one share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("share", type=int)
    parser.add_argument("of", type=int)
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    target = Target(device=options.device, folder=options.folder, out=options.folder)
    if target.is_rehearsal:
        from benchmarks.gpu import rehearsal

        rehearsal.install()
    for name, launch in launches(target)[options.share :: options.of]:
        began = time.monotonic()
        error = None
        try:
            launch()
        except Exception as raised:  # noqa: BLE001 - said in the row; the others are launched all the same
            error = f"{type(raised).__name__}: {raised}"[:300]
        _give_back(target)
        row = {"launch": name, "seconds": round(time.monotonic() - began, 2), "error": error}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
