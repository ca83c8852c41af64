"""Check and measure the Triton kernels on the GPU at hand, with one command and no installation.

    python3 benchmarks/gpu.py [--parts tests,decode,long,mixed,extend,write,linear] [--out F] [--rivals DIR]

First the GPU tests, then the benchmarks, then one JSON with device, driver, versions, commit and every
figure. Needs torch and triton, transformers, numpy, safetensors, pytest, click, rich and xxhash. All
parts together are made to end within 9 minutes; what the time does not suffice for is named as skipped.
"""

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["TRITON_INTERPRET"] = "0"  # before anything imports Triton

FORMATS = ["bf16", "fp8", "int8", "int4", "int4_g64", "int4_g32_rot"]
MEASURED = ("decode", "long", "mixed", "extend", "write", "linear")
PARTS = ("tests", *MEASURED)  # and, only when asked for: sanitizer, tune, tune-linear
EXTRA = ("sanitizer", "tune", "tune-linear")
REPEATS = 11
SHAPES = ((4096, 14_336), (14_336, 4096), (4096, 4096))  # inputs, outputs of Linear layers
ROWS = (1, 4, 16, 64, 256, 2048)
WEIGHTS = ("int4_g128", "int4_g128_asym", "int8", "w8a8", "fp8", "fp8_a8")


def workload(contexts: tuple[int, ...], new: int = 1, block_size: int = 64) -> Any:
    """32 query and 8 KV heads of 128, bf16."""
    from kvq.bench.workload import Workload

    return Workload(
        contexts=contexts,
        new=new,
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        block_size=block_size,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        backend="triton",
    )


def attention(
    case: str, shape: Any, rivals: Path | None, formats: list[str], dense: bool = True
) -> list[dict]:
    """Rows of `kvq bench attention` for one case."""
    from kvq.bench.attention import bench_attention

    rows, bandwidth = bench_attention(shape, formats, rivals=rivals, dense_rivals=dense, repeats=REPEATS)
    torch.cuda.empty_cache()
    return [{"case": case, "read_gb_per_s": bandwidth, **row} for row in rows]


def decode(rivals: Path | None) -> list[dict]:
    """Batch 64 at depth 8,192, blocks of 64 and 16."""
    rows = attention("decode 64 x 8192", workload((8192,) * 64), rivals, FORMATS)
    small = workload((8192,) * 64, block_size=16)
    return rows + attention("decode 64 x 8192, blocks of 16", small, None, FORMATS[:4], dense=False)


def long(rivals: Path | None) -> list[dict]:
    """One sequence of 131,072 tokens, and the slope from 1,024 on."""
    rows = attention("decode 1 x 131072", workload((131_072,)), rivals, ["bf16", "fp8", "int8", "int4"])
    for context in (1024, 8192, 32_768):
        case = f"decode 1 x {context}"
        rows += attention(case, workload((context,)), None, ["bf16", "fp8", "int4"], dense=False)
    return rows


def mixed(rivals: Path | None) -> list[dict]:
    """128 log-normal lengths between 128 and 32,768 beside as many tokens in equal ones."""
    from kvq.bench.workload import lengths

    drawn = lengths("128-32768", 128, 0)
    rows = attention("decode 128, log-normal", workload(drawn), None, ["bf16", "int4"], dense=False)
    even = workload((sum(drawn) // 128,) * 128)
    return rows + attention("decode 128, equal", even, None, ["bf16", "int4"], dense=False)


def extend(rivals: Path | None) -> list[dict]:
    """2,048 new tokens over 32,768."""
    return attention("extend 2048 over 32768", workload((34_816,), new=2048), rivals, FORMATS)


def write(rivals: Path | None) -> list[dict]:
    """Quantize and append one token of 256 sequences at depth 4,096, beside their attention."""
    from kvq.bench.write import bench_write

    shape = workload((4096,) * 256)
    rows = bench_write(shape, FORMATS, repeats=REPEATS)
    torch.cuda.empty_cache()
    written = [{"case": "write 256 at 4096", **row} for row in rows]
    return written + attention("decode 256 x 4096", shape, None, FORMATS, dense=False)


def linear_workload(shape: tuple[int, int], rows: int) -> Any:
    """A layer of that many inputs and outputs, bf16."""
    from kvq.bench.linear import LinearWorkload

    return LinearWorkload(
        in_features=shape[0],
        out_features=shape[1],
        rows=rows,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        backend="triton",
    )


def linear(rivals: Path | None) -> list[dict]:
    """Linear layers of an 8B model beside torch's bf16, from one row to a prefill chunk."""
    from kvq.bench.linear import bench_linear

    rows: list[dict] = []
    for shape in SHAPES:
        for count in ROWS:
            found, bandwidth = bench_linear(linear_workload(shape, count), WEIGHTS, repeats=REPEATS)
            dense_ms = next(row["ms_median"] for row in found if row["name"] == "torch")
            case = {"case": f"linear {shape[0]} to {shape[1]}", "read_gb_per_s": bandwidth}
            rows += [case | row | {"speedup_over_bf16": dense_ms / row["ms_median"]} for row in found]
            torch.cuda.empty_cache()
    return rows


def run_tests(reduced: bool, limit_s: float) -> dict[str, Any]:
    """The GPU test suite in a process of its own, `limit_s` seconds at most; with `reduced`, under
    compute-sanitizer.
    """
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-x", "-p", "no:cacheprovider"]
    if reduced:
        checker = shutil.which("compute-sanitizer")
        if checker is None:
            return {"passed": None, "summary": "compute-sanitizer is not installed"}
        command = [checker, "--tool", "memcheck", "--error-exitcode", "9", *command, "-k", "reduced"]
    began = time.monotonic()
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired as late:
        done = (late.stdout or b"").decode(errors="replace").strip().splitlines()
        return {"passed": None, "summary": f"stopped after {limit_s:.0f} s: {done[-1] if done else ''}"}
    lines = run.stdout.strip().splitlines()
    if run.returncode:
        print("\n".join(lines[-60:]), run.stderr[-2000:], flush=True)
    return {
        "passed": run.returncode == 0,
        "summary": lines[-1] if lines else "",
        "seconds": time.monotonic() - began,
    }


def tune() -> list[dict]:
    """The fastest tile shapes, into the checked-in table."""
    from kvq.bench import tune as tuning

    rows: list[dict] = []
    found = []
    for shape in (workload((8192,) * 32), workload((8192,) * 2, new=1024)):
        for kv in ("bf16", "fp8", "int8", "int4", "int4_g32_rot"):
            key, best, tried = tuning.tune(shape, kv)
            found.append((key, best))
            rows += tried
            print(key, best, flush=True)
            torch.cuda.empty_cache()
    tuning.write_table(found)
    return rows


def tune_linear() -> list[dict]:
    """The fastest tiles of Linear layers, into the same table."""
    from benchmarks import linear_tiles
    from kvq.bench import tune as tuning
    from kvq.kernels.linear import tiles

    rows: list[dict] = []
    found = []
    for kind in WEIGHTS:
        for height in (*tiles.ROW_CLASSES, tiles.MANY_ROWS):
            layer = linear_workload(SHAPES[0], 256 if height == tiles.MANY_ROWS else height)
            key, best, tried = linear_tiles.tune_linear(layer, kind)
            found.append((key, best))
            rows += tried
            print(key, best, flush=True)
            torch.cuda.empty_cache()
    tuning.write_table(found)
    return rows


def driver() -> str:
    """The NVIDIA driver's version."""
    try:
        run = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run.stdout.strip().splitlines()[0]


def table(rows: list[dict]) -> None:
    """The figures, last."""
    for row in rows:
        if "weights" in row:
            print(
                f"{row['case']:24s} {row['rows']:5d} {row['weights']:14s} {row['ms_median']:9.4f} ms "
                f"({row['ms_p10']:.4f} - {row['ms_p90']:.4f})  {row['gb_per_s']:7.0f} GB/s "
                f"{row['fraction_of_limit']:6.1%}  {row['speedup_over_bf16']:5.2f}x  "
                f"error {row['max_relative_error']:.1e}"
            )
        elif "kv" in row and "ms_median" in row:
            print(
                f"{row['case']:32s} {row['name']:20s} {row['kv']:14s} {row['ms_median']:9.4f} ms "
                f"({row['ms_p10']:.4f} - {row['ms_p90']:.4f})  {row['gb_per_s']:7.0f} GB/s "
                f"{row['fraction_of_bandwidth']:6.1%}  error {row['max_relative_error']:.1e}"
            )
        elif "kv" in row and "us_median" in row:
            print(f"{row['case']:32s} {row['name']:20s} {row['kv']:14s} {row['us_median']:9.2f} us")


def main() -> None:
    """Test, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join((*PARTS, *EXTRA))
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {known}")
    parser.add_argument("--out", help="the JSON; default benchmarks/results/gpu-<device>-<date>.json")
    parser.add_argument("--rivals", type=Path, help="a folder with a rivals.py, see kvq bench attention")
    parser.add_argument("--minutes", type=float, default=7.5, help="begin no part after so many")
    options = parser.parse_args()
    parts = options.parts.split(",")
    unknown = set(parts) - {*PARTS, *EXTRA}
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; known: {known}")
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs an NVIDIA GPU, and torch sees none")
    from kvq.evals.results import envelope, source_commit, write_json

    source_commit()
    began = time.monotonic()
    checked: dict[str, Any] = {}
    rows: list[dict] = []
    skipped: list[str] = []
    failed: dict[str, str] = {}
    measuring: dict[str, Callable[[Path | None], list[dict]]] = {
        "decode": decode,
        "long": long,
        "mixed": mixed,
        "extend": extend,
        "write": write,
        "linear": linear,
    }
    tuners: dict[str, Callable[[], list[dict]]] = {"tune": tune, "tune-linear": tune_linear}
    for part in parts:
        if time.monotonic() - began > 60 * options.minutes:
            skipped.append(part)
            continue
        print(f"{part} ...", flush=True)
        if part in ("tests", "sanitizer"):
            left = 60 * options.minutes - (time.monotonic() - began)
            checked[part] = run_tests(part == "sanitizer", min(left, 300.0))
            print(checked[part]["summary"], flush=True)
            if checked[part]["passed"] is False:
                break  # no figures of kernels that are wrong
            continue
        try:
            rows += tuners[part]() if part in tuners else measuring[part](options.rivals)
        except Exception as error:  # noqa: BLE001 one case out of memory, or wrong, must not lose the others
            failed[part] = f"{type(error).__name__}: {str(error)[:500]}"
            print(f"{part} failed: {failed[part]}", flush=True)
            torch.cuda.empty_cache()
    device = torch.cuda.get_device_name()
    facts = {
        "driver": driver(),
        "cuda": torch.version.cuda,
        "tests": checked,
        "skipped": skipped,
        "failed": failed,
        "seconds": time.monotonic() - began,
    }
    result = envelope(sys.argv, torch.device("cuda"), rows, facts)
    result["versions"]["triton"] = __import__("triton").__version__
    name = "-".join(device.lower().split())
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    out = Path(options.out) if options.out else ROOT / "benchmarks" / "results" / f"gpu-{name}-{date}.json"
    write_json(out, result)
    table(rows)
    for part in skipped:
        print(f"skipped for lack of time: {part}")
    print(f"written: {out.name}")
    sys.exit(bool(failed) or any(x["passed"] is False for x in checked.values()))


if __name__ == "__main__":
    main()
