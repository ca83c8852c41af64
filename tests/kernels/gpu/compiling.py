"""Kernels compiled in a process of its own: here they are interpreted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def compiled_by(module: str, device: str, *names: str) -> list[dict[str, Any]]:
    """What a module's kernels use, a line of JSON each, compiled for `sm90` or `gfx942`."""
    run = subprocess.run(
        [sys.executable, "-m", module, device, *names],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]
