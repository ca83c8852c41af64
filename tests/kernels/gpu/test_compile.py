"""The Triton kernels compile for GPUs that are not at hand, and decode keeps its state in registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHARED_BYTES = {"sm80": 163 * 1024, "sm86": 99 * 1024, "sm90": 227 * 1024}  # that a block may have
FEW = ["int4", "fp8@fp16,64,64", "int8/bf16"]
MANY = [
    *(
        "bf16",
        "fp16",
        "fp32@fp32,64,64",
        "fp8",
        "fp8_per_head",
        "int8",
        "int8_per_head",
        "int4",
        "int4_g32_rot",
    ),
    *("int4_g128", "int4_g16@fp16,64,64", "k8v4", "int4/fp8", "fp8_rot@fp16,96,80", "int4@bf16,80,192"),
    "int2",
    *("int4@bf16,256,256", "int8@bf16,256,256", "int4@fp16,48,60", "int4@fp32,128,128", "bf16@fp32,128,128"),
]


def compile_all(device: str, formats: list[str]) -> None:
    """Compile in a process of its own and check what the kernels use."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.gpu.compile_all", device, *formats],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) == 7 * len(formats)
    for used in found:
        assert used["shared"] <= SHARED_BYTES[device], used
        if used["kernel"] == "attend decode" and "fp32" not in used["kv"] and "256" not in used["kv"]:
            assert used["stack"] == 0, f"registers spilled: {used}"


@pytest.mark.parametrize("device", ["sm80", "sm90"])
def test_kernels_compile(device: str) -> None:
    compile_all(device, FEW)


@pytest.mark.long
@pytest.mark.parametrize("device", list(SHARED_BYTES))
def test_kernels_compile_for_every_format(device: str) -> None:
    compile_all(device, MANY)
