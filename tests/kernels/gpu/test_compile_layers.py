"""What lies between a layer's products compiles for GPUs that are not at hand, and keeps to registers."""

import pytest

from tests.kernels.gpu.compiling import compiled_by

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
    """Compile, and check what the kernels use."""
    found = compiled_by("tests.kernels.gpu.compile_layers", device, *names)
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
