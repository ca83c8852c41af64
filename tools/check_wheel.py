"""Wheel check: an installed wheel works with nothing but its requirements; `make wheel` runs it there."""

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import kvq
from kvq.kernels.native import library

CLONE = Path(__file__).parents[1]


def run(*arguments: str) -> str:
    """Return what a kvq command of this environment prints; it must succeed."""
    command = [str(Path(sys.executable).with_name("kvq")), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """Check the package, its kernels, its command and the embedded model; raise AssertionError."""
    home = Path(kvq.__file__).parent
    assert sys.prefix in str(home), f"kvq comes from {home}, not from the wheel"
    assert home != CLONE / "kvq", "kvq comes from the clone"

    built = ctypes.CDLL(str(library._path()))
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    lacks = [
        x for x in library.VARIANTS if not hasattr(built, f"kvq_{x}_attend") and (is_x86 or x == "portable")
    ]
    assert not lacks, f"the wheel has no kernels for {lacks}"

    assert kvq.__version__ in run("--version")
    assert f"({library.loaded().best})" in run("doctor"), "the kernels that run are not this CPU's best"
    text = run(
        "generate", "--model", "tiny", "--kv", "int4", "--max-tokens", "16", "--temperature", "0", "The city"
    )
    assert len(text) > 20, f"generated {text!r}"
    print(f"kvq {kvq.__version__} runs from the wheel, with kernels for {', '.join(library.VARIANTS)}")


if __name__ == "__main__":
    main()
