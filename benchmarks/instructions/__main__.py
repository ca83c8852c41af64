"""Compile every kernel for GPUs that are not there, and count what it asks of them.

    python -m benchmarks.instructions [--sm 80,89,90,100] [--kv bf16,int4_g64] [--kernel decode] [--out FILE]
    python -m benchmarks.instructions --markdown            # tables for a document
    python -m benchmarks.instructions --check               # against budgets.json; 1 if one is broken
    python -m benchmarks.instructions --write-budgets       # take what is counted as what is allowed

With Triton as it is installed. For another version, put one before it:

    pip install --no-deps --target build/triton-3.6.0 triton==3.6.0
    PYTHONPATH=build/triton-3.6.0 python -m benchmarks.instructions
"""

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

FORMATS = ("bf16", "fp8", "int8", "int4_g64", "int4_g32", "int4")
SHARED = "sm90"  # where decode is counted for all numbers of query heads, too


def main() -> None:
    """Count, show, and keep or check what the command line asks for."""
    options = parsed()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        sys.exit("TRITON_INTERPRET is set, so kernels are interpreted: unset it")
    from benchmarks.instructions import budgets, table

    rows = []
    for row in counted_rows(options):
        rows.append(row)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    shown = table.markdown if options.markdown else table.plain
    for title, found in table.tables(rows):
        print(f"{title}\n\n{shown(found)}\n")
    if options.out:
        keep(options.out, rows)
    if options.write_budgets:
        budgets.write(rows)
    if options.check:
        known = budgets.read()
        for version in {row["triton"] for row in rows} - known.keys():
            print(f"there are no budgets for Triton {version}", file=sys.stderr)
        if wrong := budgets.broken(rows, known):
            sys.exit("\n".join(wrong))


def keep(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write them as other measurements are written."""
    import torch
    import triton

    from kvq.evals.report.results import envelope, write_json

    facts = {"triton": triton.__version__, "counted": "compiled without a GPU; nothing was run"}
    write_json(file, envelope(sys.argv, torch.device("cpu"), rows, facts))


def counted_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of all kernels with that in their names, device by device."""
    from benchmarks.instructions.counting import counted, of_any_format, of_format, of_shares

    for sm in options.sm:
        device = f"sm{sm}"
        asked = chain.from_iterable(of_format(kv, device) for kv in options.kv)
        shares = of_shares(device) if device == SHARED else ()
        for one in chain(asked, *((shares, of_any_format(device)) if options.all_kernels else ())):
            if options.kernel in one.name:
                yield counted(one)


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.instructions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kv", help="KV formats; with none named, also what has no format of KV")
    parser.add_argument("--sm", default="80,89,90,100", help="compute capabilities")
    parser.add_argument("--kernel", default="", help="a part of the names of kernels")
    parser.add_argument("--out", type=Path, help="write JSON there")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write-budgets", action="store_true")
    options = parser.parse_args()
    options.all_kernels = options.kv is None
    options.kv = options.kv.split(",") if options.kv else FORMATS
    options.sm = options.sm.split(",")
    return options


if __name__ == "__main__":
    main()
