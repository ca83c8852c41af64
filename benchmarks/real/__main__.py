"""Measure KV formats on the real models of a lab that `make real` made; see docs/real.md.

    python -m benchmarks.real [--folder LAB] [--models qwen05,qwen15] [--parts wikitext] \\
        [--kv int8,int4] [--tokens 4000] [--out benchmarks/results]

Every row is kept in LAB/rows.jsonl once it is there, and what is there is not measured again, so a run that
ended goes on where it was. The embedded model, --models tiny, needs no lab.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.real.bench import AS_STORED, Bench
from benchmarks.real.clock import Clock
from benchmarks.real.closeness import full_name
from benchmarks.real.hidden import BASELINE
from benchmarks.real.lab import EMBEDDED, FOLDER, Lab
from benchmarks.real.packages import MODELS
from benchmarks.real.parts import PARTS, Sizes
from benchmarks.real.records import STORED, Records, Row, Settings, merged, published
from benchmarks.real.tables import compared, tables
from kvq.errors import ConfigError, EngineError, KVQError
from kvq.evals.report.results import envelope, source_commit, write_json
from kvq.fileio import check_writable

_KV = "bf16,int8,int4,int4_mean"
Case = tuple[str, Settings, str]  # part, settings, KV format


def main(arguments: Sequence[str]) -> None:
    """Measure what is not there yet, write it, print it.

    Raises:
        KVQError: options that can't be used, or measurements that failed when all others are made.
    """
    options = options_of(arguments)
    source_commit()
    lab = Lab(folder=options.folder, data=options.data)
    before = {part: published(_file(options.out, part)) for part in options.parts if options.out is not None}
    records = Records(lab.rows, [row for some in before.values() for row in some])
    benches = {name: Bench(lab, name, options.weights) for name in options.models}
    cases = {name: _cases(bench, options) for name, bench in benches.items()}
    todo = {
        name: [one for one in some if options.again or _row(records, name, one) is None]
        for name, some in cases.items()
    }
    clock = Clock(records.seconds_of, [(name, one[0]) for name, some in todo.items() for one in some])
    failed = 0
    for name, some in todo.items():
        for case in some:
            failed += not measure(benches[name], case, records, clock)
        benches.pop(name)  # and its weights
    found = [_row(records, name, one) for name, some in cases.items() for one in some]
    rows = [row for row in found if row is not None]
    for part, published_before in before.items():
        of_part = [row for row in rows if row["part"] == part]
        publish(
            _file(options.out, part),
            merged(published_before, of_part),
            ["python", "-m", "benchmarks.real", *arguments],
        )
    print("\n".join(tables(compared(rows))))
    if failed:
        raise EngineError(f"{failed} measurements failed, see above; run it again to try only those")


def measure(bench: Bench, case: Case, records: Records, clock: Clock) -> bool:
    """Make one row and keep it; False if that failed, which is told and keeps nobody else."""
    part, settings, kv = case
    clock.begin(f"{part} of {bench.name} over {kv}")
    try:
        found = PARTS[part].measure(bench, kv, settings, clock.progress)
    except KVQError as error:
        clock.end()
        print(f"  failed: {error}", flush=True)
        return False
    records.add(bench.name, part, kv, settings, found | {"seconds": round(clock.end(), 1)})
    return True


def publish(path: Path, rows: Sequence[Row], command: list[str]) -> None:
    """Write a file of rows of one part."""
    licences = {row["model"]: MODELS[row["model"]].licence for row in rows if row["model"] in MODELS}
    facts = {"weights": "4 to 8 bits in GGUF, dequantized", "licences": licences}
    some = [{name: value for name, value in row.items() if name != "key"} for row in compared(rows)]
    write_json(path, envelope(command, torch.device("cpu"), some, facts))


def _file(folder: Path, part: str) -> Path:
    return folder / f"real-{part}.json"


def _cases(bench: Bench, options: argparse.Namespace) -> list[Case]:
    """All that is asked for on a model, the baseline of each part first, rivals last."""
    sizes = Sizes(**{name: getattr(options, name) for name in ("tokens", "problems", "facts", "windows")})
    rounded = {} if bench.weights == AS_STORED else {"weights": bench.weights}
    formats = {kv: full_name(bench.prepared, kv) for kv in [BASELINE, *options.kv]}
    return [
        (part, dict(settings) | rounded | {STORED: stored}, kv)
        for part in options.parts
        for settings in PARTS[part].settings(bench, sizes)
        for kv, stored in (formats | {name: name for name in PARTS[part].others}).items()
    ]


def _row(records: Records, name: str, case: Case) -> Row | None:
    part, settings, kv = case
    return records.find(name, part, kv, settings)


def names(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes comma-separated names."""

    def read(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        return found

    return read


def formats(text: str) -> list[str]:
    """Read names of formats, separated by commas."""
    return [kv.strip() for kv in text.split(",")]


def windows(text: str) -> tuple[int, ...]:
    """Read numbers of tokens, separated by commas."""
    return tuple(map(int, text.split(",")))


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: a folder that nothing can be written to.
    """
    usual = [name for name, part in PARTS.items() if not part.when_asked]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="the lab (%(default)s)")
    parser.add_argument(
        "--data", type=Path, default=Lab().data, help="folder of wikitext-2/test.txt (%(default)s)"
    )
    parser.add_argument(
        "--models", type=names([*MODELS, EMBEDDED]), default=list(MODELS), help="comma-separated"
    )
    parser.add_argument(
        "--parts", type=names(list(PARTS)), default=usual, help=f"of {', '.join(PARTS)} ({', '.join(usual)})"
    )
    parser.add_argument("--kv", type=formats, default=_KV.split(","), help="formats, comma-separated")
    parser.add_argument(
        "--tokens",
        type=int,
        default=Sizes().tokens,
        help="of WikiText-2 (%(default)s); of essays twice as many; of checks and rivals at most 2,048",
    )
    parser.add_argument(
        "--windows",
        type=windows,
        default=Sizes().windows,
        help="tokens of the essays' windows",
    )
    parser.add_argument("--problems", type=int, default=Sizes().problems, help="of HumanEval, the first ones")
    parser.add_argument("--facts", type=int, default=Sizes().facts, help="planted and asked for")
    parser.add_argument(
        "--weights",
        default=AS_STORED,
        help="rounded on load, as kvq's --weights: tasks take less time (%(default)s: as stored)",
    )
    parser.add_argument("--again", action="store_true", help="measure what is there, too")
    parser.add_argument("--out", type=Path, help="folder of real-PART.json")
    options = parser.parse_args(arguments)
    for name in ("tokens", "problems", "facts"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(options, name)}")
    if min(options.windows) < 2:
        raise ConfigError(f"--windows must be of 2 tokens at least, got {options.windows}")
    if options.out is not None:
        check_writable(options.out / "real-.json")
    return options


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (KVQError, OSError) as error:
        sys.exit(f"python -m benchmarks.real: {error}")
