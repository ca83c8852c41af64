"""Resolve kvq's extras with pip, each by itself, some beside packages that others pin: `make resolve`.

    python tools/resolve.py [EXTRA ...]     # those alone; '' is kvq without extras

Each is a line. Nothing is installed and, by a pip that reads wheels' metadata apart, next to nothing
downloaded. Constraints that this machine's pip is configured with are left out; its indexes and folders of
wheels are kept.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

ROOT = Path(__file__).parents[1]
VENV = ROOT / "build" / "resolve"
PIP = "pip>=26"  # earlier ones download every wheel of a dry run
BESIDE = {  # extra -> what others pin, as lines of a constraints file or as such a file
    "vllm": ("vllm==0.32.0", "vllm==0.33.0", "torch==2.14.0"),
    "dev": ("constraints.txt",),
    "docs": ("constraints.txt",),
}
SHOWN = ("torch", "transformers", "llguidance", "vllm", "lmcache", "ray", "lm_eval")


def main(wanted: list[str]) -> int:
    """Try every case; 1 if one can't be resolved."""
    extras = ["", *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]]
    if unknown := [extra for extra in wanted if extra not in extras]:
        print(f"no such extras: {unknown}; there are {extras}", file=sys.stderr)
        return 2
    python = _environment()
    chosen = wanted or extras
    cases = [(extra, "") for extra in chosen] + [
        (extra, pin) for extra in chosen for pin in BESIDE.get(extra, ())
    ]
    print(f"{len(cases)} resolutions, some 10 to 60 s each", flush=True)
    resolved = [_try(python, extra, pin) for extra, pin in cases]  # also those after one that failed
    return int(not all(resolved))


def _environment() -> str:
    python = str(VENV / "bin" / "python")
    if not (VENV / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PIP], check=True
        )
        (VENV / "ready").touch()
    return python


def _try(python: str, extra: str, pin: str) -> bool:
    """Resolve one case and print its line; of a failure what pip said."""
    what = f".[{extra}]" if extra else "."
    began = monotonic()
    with TemporaryDirectory() as folder:
        report, constraints = Path(folder, "report.json"), Path(folder, "constraints.txt")
        constraints.write_text(pin if "==" in pin else (ROOT / pin).read_text() if pin else "")
        options = ["--quiet", "--dry-run", "--ignore-installed", "--disable-pip-version-check"]
        done = subprocess.run(
            [python, "-m", "pip", "install", *options, "--report", report, what],
            env={**os.environ, "PIP_CONSTRAINT": str(constraints)},  # instead of the machine's own
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        found = json.loads(report.read_text())["install"] if not done.returncode else []
    taken = {each["metadata"]["name"]: each["metadata"]["version"] for each in found}
    versions = ", ".join(f"{name} {taken[name]}" for name in SHOWN if name in taken)
    name = f"{what} with {pin}" if pin else what
    print(f"{'ok  ' if found else 'FAIL'} {name:32} {versions} ({monotonic() - began:.0f} s)", flush=True)
    if not found:
        print(done.stderr.rstrip(), flush=True)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
