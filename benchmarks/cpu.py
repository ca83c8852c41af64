"""Measure the C++ kernels on the CPU at hand, beside torch's attention, with one command.

    python benchmarks/cpu.py [--parts decode,extend,depths,write] [--threads N] [--out F]

decode: one sequence of 32,768 tokens, with 4 query heads a KV head and with 1. extend: 512 new tokens over
8,192. depths: bf16, int8 and int4 at 512 to 131,072 tokens and batches of 1 to 64, up to 1 Mi tokens in all;
fewer bits should never be slower. write: one token of 8 sequences at depth 8,192, beside their attention.
Every contender is checked against fp64 first, then all of a shape are timed in turn.
"""

import argparse
import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvq.bench.kernels.attention import bench_attention
from kvq.bench.kernels.workload import Workload
from kvq.bench.kernels.write import bench_write
from kvq.evals.report.results import envelope, source_commit, write_json
from kvq.kernels.native.library import loaded

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
DEPTHS = (512, 2048, 8192, 32_768, 131_072)
BATCHES = (1, 4, 16, 64)
MOST_TOKENS = 1 << 20
# Two of them staged, with means of blocks and without.
DECODED = [
    *("bf16", "fp8", "int8", "int8_per_head", "int6", "int5", "int4", "int4_g64_rot", "int3", "int2"),
    *("int4+recent=1", "int4_mean"),
]


def workload(contexts: tuple[int, ...], group: int, new: int = 1) -> Workload:
    """8 KV heads of 128, `group` query heads each, fp32 queries, blocks of 64."""
    return Workload(
        contexts=contexts,
        new=new,
        q_heads=8 * group,
        kv_heads=8,
        head_dim=128,
        block_size=64,
        dtype=torch.float32,
        device=CPU,
        backend="cpu",
    )


def attention(
    case: str, shape: Workload, formats: Sequence[str], repeats: int, dense: bool = True
) -> list[dict[str, Any]]:
    """Rows of `kvq bench attention` for one shape."""
    rows, bandwidth = bench_attention(shape, formats, dense_rivals=dense, repeats=repeats)
    found = [{"case": case, "read_gb_per_s": bandwidth, **row} for row in rows]
    show(found)
    return found


def decode() -> list[dict[str, Any]]:
    """One long sequence."""
    rows = []
    for group in (4, 1):
        rows += attention(
            f"decode 1 x 32768, GQA {group}",
            workload((32_768,), group),
            DECODED,
            31,
        )
    return rows


def extend() -> list[dict[str, Any]]:
    """A prefill chunk over cached context."""
    shape = workload((8704,), 4, new=512)
    return attention("extend 512 over 8192", shape, ["bf16", "fp8", "int8", "int4", "int3"], 7)


def depths() -> list[dict[str, Any]]:
    """Every depth and batch, kvq's formats alone."""
    rows = []
    for group in (4, 1):
        for depth in DEPTHS:
            for batch in BATCHES:
                if batch * depth > MOST_TOKENS:
                    continue
                repeats = 15 if batch * depth > 1 << 17 else 61
                case = f"depth {depth} x {batch}, GQA {group}"
                shape = workload((depth,) * batch, group)
                rows += attention(case, shape, ["bf16", "int8", "int4"], repeats, dense=False)
    return rows


def write() -> list[dict[str, Any]]:
    """Quantize and store one token of every sequence, and what its attention takes."""
    rows = []
    for group in (4, 1):
        shape = workload((8192,) * 8, group)
        formats = ["bf16", "fp8", "int8", "int4"]
        rows += [
            {"case": f"write 8 at 8192, GQA {group}", **row}
            for row in bench_write(shape, formats, repeats=101)
        ]
        rows += attention(f"decode 8 x 8192, GQA {group}", shape, formats, 31, dense=False)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """One line a row."""
    for row in rows:
        print(
            f"{row['case']:28s} {row['name']:22s} {row['kv']:14s} {row['ms_median']:9.3f} ms "
            f"({row['ms_p10']:.3f} - {row['ms_p90']:.3f})  {row['gb_per_s']:5.1f} GB/s "
            f"{row['fraction_of_bandwidth']:6.1%}  error {row['max_relative_error']:.1e}",
            flush=True,
        )


def summary(rows: list[dict[str, Any]]) -> None:
    """Speed beside the best of torch's, fewer bits beside more, a write beside its attention."""
    cases: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        ms = row["ms_median"] if "ms_median" in row else row["us_median"] / 1e3
        cases.setdefault(row["case"], {})[row["name"], row["kv"]] = ms
    for case, found in cases.items():
        mine = {kv: ms for (name, kv), ms in found.items() if name == "kvq"}
        rival = min((ms for (name, _), ms in found.items() if name.startswith("SDPA")), default=None)
        line = ""
        if case.startswith("write"):
            whole = cases["decode" + case.removeprefix("write").replace(" at ", " x ")]
            line = ", ".join(f"{kv} {ms / whole['kvq', kv]:.1%} of its attention" for kv, ms in mine.items())
        elif rival is not None:
            line = ", ".join(f"{kv} {rival / ms:.2f}x the best SDPA" for kv, ms in mine.items())
        elif {"bf16", "int8", "int4"} <= set(mine):
            first, second = mine["int8"] / mine["bf16"], mine["int4"] / mine["int8"]
            line = f"int8 / bf16 {first:.2f}, int4 / int8 {second:.2f}"
        print(f"{case:28s} {line}")


def main() -> None:
    """Measure, write, sum up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measuring: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "decode": decode,
        "extend": extend,
        "depths": depths,
        "write": write,
    }
    parser.add_argument("--parts", default=",".join(measuring), help=f"of {', '.join(measuring)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", help="the JSON; default benchmarks/results/kernels-cpu-<date>.json")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(measuring):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; known: {', '.join(measuring)}")
    torch.set_num_threads(options.threads)
    source_commit()
    rows = [row for part in parts for row in measuring[part]()]
    result = envelope(sys.argv, CPU, rows, {"variant": loaded().variant, "threads": options.threads})
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    out = Path(options.out or ROOT / "benchmarks" / "results" / f"kernels-cpu-{date}.json")
    write_json(out, result)
    summary(rows)
    print(f"written: {out.name}")


if __name__ == "__main__":
    main()
