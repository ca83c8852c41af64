"""JSON envelope used by all commands that take measurements."""

import dataclasses
import datetime
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kvq import fileio
from kvq.version import __version__


def envelope(
    command: list[str], device: torch.device, rows: Sequence[Any], facts: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """Return a command's JSON object: `rows` are dicts or dataclasses, `facts` are additional keys."""
    return {
        "kvq_version": __version__,
        "commit": source_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": describe_device(device),
        "versions": versions(),
        "command": shlex.join(_without_secrets(command)),
        **(facts or {}),
        "rows": [dataclasses.asdict(r) if dataclasses.is_dataclass(r) else r for r in rows],  # type: ignore[arg-type]
    }


def _without_secrets(command: list[str]) -> list[str]:
    """Return the command line with the value of --token masked."""
    before = ["", *command]
    return [
        "***" if last == "--token" else "--token=***" if word.startswith("--token=") else word
        for last, word in zip(before, command, strict=False)
    ]


def write_json(path: str | Path, result: dict[str, Any]) -> None:
    """Write an envelope to a temporary file, then rename it."""
    fileio.write_text(path, json.dumps(result, indent=1, allow_nan=False) + "\n")


def describe_device(device: torch.device) -> str:
    """Return a line that describes the hardware: the GPU, or the CPU and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def versions() -> dict[str, str]:
    """Return the software versions that figures may depend on."""
    import transformers

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def source_commit() -> str | None:
    """Return a source checkout's commit, with `-dirty` if it was modified, or None for an installed copy.

    The commit is looked up once. Long measurements call this function at the start, so the result names the
    code that ran.
    """
    root = Path(__file__).parents[3]
    if not (root / ".git").exists() or sys.platform == "win32":
        return None
    try:
        run = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()
