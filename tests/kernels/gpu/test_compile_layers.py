"""What lies between a layer's products compiles for GPUs that are not at hand, and keeps to registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FEW = ["add_norm", "gated", "int4_g64_rot@bf16,128"]
MANY = [
    "bf16",
    "fp8@bf16,96",
    "fp8_per_head_rot@fp16,64",
    "int8@fp16,80",
    "int2",
    "fp32@fp32,64",
    "int4@bf16,256",
]
LAUNCHES = {"add_norm": 4, "gated": 3}  # of rope_write 4


def compile_layers(device: str, names: list[str]) -> None:
    """Compile in a process of its own and check what the kernels use."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.gpu.compile_layers", device, *names],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) == sum(LAUNCHES.get(name, 4) for name in names)
    for used in found:
        assert used["stack"] == 0, f"registers spilled: {used}"
        assert used["shared"] <= 16 * 1024, used


@pytest.mark.parametrize("device", [pytest.param("sm80", marks=pytest.mark.long), "sm90"])
def test_kernels_compile(device: str) -> None:
    compile_layers(device, FEW)


@pytest.mark.long
@pytest.mark.parametrize("device", ["sm80", "sm86", "sm90"])
def test_kernels_compile_for_every_format(device: str) -> None:
    compile_layers(device, MANY)
