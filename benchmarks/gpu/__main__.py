"""Check and measure all that runs on a GPU, with one command and no installation.

    make gpu [PARTS=facts,tests,decode] [OUT=folder] [MINUTES=9]
    python3 -m benchmarks.gpu [--parts ...] [--out FOLDER] [--minutes M] [--rivals DIR] [--list]

Parts run in order of value, each in a process and with a time limit of its own; what no longer fits is
skipped, and said. After every case `results.json` in --out holds all that is known by then. Needs torch,
triton, transformers, numpy, safetensors, pytest and xxhash. docs/gpu.md says what each figure means.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from benchmarks.gpu import record, summary
from benchmarks.gpu.parts import PARTS, Part, chosen
from benchmarks.gpu.runner import ROOT, WORKER, Run, run_part


def main() -> None:
    """Run parts, keep what they found, print it last."""
    options = parsed()
    if options.list:
        for part in PARTS:
            rare = "; only when asked for" if part.when_asked else ""
            print(f"{part.name:12s} {part.limit_s:4.0f} s at most  {part.what}{rare}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    for part in options.chosen:
        prepare(options.work / f"{part.name}.json", resumes=options.resume)
    sys.exit(not measure(options))


def prepare(file: Path, *, resumes: bool) -> None:
    """Forget what a part found before; with `resumes` only what it failed at."""
    state = record.read(file)
    if state is not None and resumes:
        record.write(file, state | {"failed": {}, "running": None})
    elif state is not None:
        file.unlink()


def measure(options: argparse.Namespace, worker: str = WORKER) -> bool:
    """Run the chosen parts; True if nothing failed."""
    statuses: dict[str, str] = {}
    result = options.out / "results.json"

    def keep(_: Part | None = None) -> None:
        record.write(result, summary.collect(options.work, options.chosen, statuses))

    run = Run(
        folder=options.work,
        log=options.out / "log.txt",
        ends_at=time.monotonic() + 60 * options.minutes,
        options=worker_options(options),
        worker=worker,
        patience=options.patience,
        changed=keep,
    )
    run.log.write_bytes(b"")
    for part in options.chosen:
        print(f"{part.name}: {part.what} ...", flush=True)
        statuses[part.name] = run_part(part, run)
        print(f"{part.name}: {statuses[part.name]}, {run.left_s:.0f} s left", flush=True)
        keep()
        if statuses[part.name] == "broken":
            print(run.log.read_text(encoding="utf-8", errors="replace")[-2000:], flush=True)
            if not run.file(part).is_file():
                print(f"nothing can run on {options.device}: no part could begin", flush=True)
                break
    found = summary.collect(options.work, options.chosen, statuses)
    print("\n".join(summary.lines(found)))
    print(f"written: {result}")
    return summary.is_good(found)


def worker_options(options: argparse.Namespace) -> list[str]:
    """Return the options of every part's process."""
    given = ["--device", options.device, "--out", str(options.out)]
    given += ["--rivals", str(options.rivals)] if options.rivals else []
    return given + (["--commit", options.commit] if options.commit else [])


def parsed() -> argparse.Namespace:
    """The options; those that can't be are refused."""
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", default="", help=f"of {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    work = ROOT / "build" / "gpu"
    out = Path(os.environ.get("OUT") or work)
    parser.add_argument("--out", type=Path, default=out, help="folder of results.json and log.txt")
    parser.add_argument("--work", type=Path, default=work / "parts", help="folder of each part's own file")
    parser.add_argument("--patience", type=float, default=1.0, help="times every part's and case's limit")
    parser.add_argument("--resume", action="store_true", help="go on where files in --work end")
    parser.add_argument("--rivals", type=Path, help="a folder with a rivals.py, see kvq bench attention")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--list", action="store_true", help="say what there is")
    options = parser.parse_args()
    try:
        options.chosen = chosen([name for name in options.parts.split(",") if name])
    except ValueError as error:
        parser.error(str(error))
    for name in ("out", "work", "rivals"):
        if getattr(options, name) is not None:
            setattr(options, name, getattr(options, name).resolve())
    return options


if __name__ == "__main__":
    main()
