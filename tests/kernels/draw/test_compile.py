"""The kernels that draw compile for GPUs that are not at hand, and spill no registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.draw.compile_draw import KERNELS

ROOT = Path(__file__).parents[3]


def compile_all(device: str, *dtypes: str) -> None:
    """Compile in a process of its own, since here kernels are interpreted."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.draw.compile_draw", device, *dtypes],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) == len(KERNELS) * len(dtypes)
    for used in found:
        assert used["stack"] == 0, f"registers spilled: {used}"


def test_kernels_compile() -> None:
    compile_all("sm90", "bf16")


@pytest.mark.long
@pytest.mark.parametrize("device", ["sm80", "sm86", "sm90"])
def test_kernels_compile_for_every_gpu(device: str) -> None:
    compile_all(device, "bf16", "fp32")
