"""The Linear kernels compile for GPUs that are not at hand; codes stay in the registers of their load."""

import pytest

from kvq.kernels.gpu.support import AMD
from tests.kernels.gpu.compiling import compiled_by
from tests.kernels.linear.triton_kit import BLOCKS

SHARED_BYTES = {"sm80": 163 * 1024, "sm86": 99 * 1024, "sm90": 227 * 1024}  # that a block may have
AMD_SHARED_BYTES = 64 * 1024
FEW = ["int4_g128:16", "int4_g64_asym:16", "int8:16", "w4a8:16", "Q4_K:16", "Q6_K:16"]
MORE = ["fp8:16@fp16", "w8a8:16", "fp8_a8:16", "int4_g128:64", "w8a8:128", "int4_g128_asym:dense"]
MORE += ["Q4_K:dense", "Q6_K:128@fp16"]
NAMES = (
    *("int4_g128", "int4_g128_asym", "int4_g64_asym", "int4_g32", "int4_g8", "int4", "int3_g32", "int8"),
    *("int8_g64_asym", "int8_g16", "fp8", "fp8_a8", "w8a8", "int8_g64_asym_a8", "w4a8", "int4_g64_asym_a8"),
    *BLOCKS,
)
MANY = [f"{name}:{rows}" for name in NAMES for rows in (16, 32, 64, 128)]
MANY += [f"{name}:{rows}" for name in NAMES if "a8" not in name for rows in ("dense", "16@fp16", "16@fp32")]


def compile_all(device: str, cases: list[str]) -> None:
    """Compile, and check what the kernels use."""
    found = {x["kernel"]: x for x in compiled_by("tests.kernels.linear.compile_all", device, *cases)}
    assert len(found) == len(cases) + 3
    for case, used in found.items():
        assert used["shared"] <= SHARED_BYTES.get(device, AMD_SHARED_BYTES), used
        if "quantize" in case and "fused" in used:
            assert used["fused"] == 0, f"a product and a sum are rounded once, so bits change: {used}"
        if ":16" in case and "fp32" not in case:
            assert used["stack"] == 0, f"registers spilled: {used}"
        if ":16" in case and "fp32" not in case and device in SHARED_BYTES:
            assert used["shuffles"] == 0, f"codes move between threads: {used}"
            assert used["copies"] > 0, f"nothing is copied 16 bytes at a time: {used}"


@pytest.mark.parametrize("device", [pytest.param("sm80", marks=pytest.mark.long), "sm90"])
def test_kernels_compile(device: str) -> None:
    compile_all(device, FEW if device == "sm80" else [*FEW, *MORE])


@pytest.mark.long
def test_kernels_compile_for_amd() -> None:
    compile_all("gfx942", ["int4_g128:16", "w4a8:64", "fp8_a8:16"])


@pytest.mark.long
@pytest.mark.parametrize("device", [*SHARED_BYTES, "gfx942"])
def test_kernels_compile_for_every_format(device: str) -> None:
    compile_all(device, MANY)


@pytest.mark.long
@pytest.mark.parametrize("device", [name for name in AMD if name != "gfx942"])
def test_kernels_compile_for_every_amd_gpu_that_they_take(device: str) -> None:
    compile_all(device, [*FEW, *MORE])
