"""The Triton kernels compile for GPUs that are not at hand, and attention keeps its state in registers."""

import pytest

from benchmarks.instructions.counting import SPILLED
from kvq.kernels.gpu import shapes
from kvq.kernels.gpu.support import AMD
from tests.kernels.gpu.compiling import compiled_by

SHARED_BYTES = {
    "sm80": 163 * 1024,
    "sm86": 99 * 1024,
    "sm89": 99 * 1024,
    "sm90": 227 * 1024,
}  # that a block may have
OTHER_SHARED_BYTES = {"sm": 227 * 1024, "gf": 64 * 1024}
FEW = ["int4", "fp8@fp16,64,64", "int8/bf16", "int4_per_channel/int4"]
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
    *("int2", "int3", "int5_g64", "int6_g64_rot", "int5@fp16,64,64", "int8/int6"),
    *(
        "int4_per_channel/int4@fp16,64,80",
        "int8_per_channel/int8",
        "int3_per_channel/int3",
        "int2_per_channel/int8",
    ),
    *(
        "int6_per_channel/int6",
        "int5_per_channel/bf16",
        "int4_per_channel/int4_mean",
        "int4_per_channel/int4@fp32,64,64",
    ),
    *("int4@bf16,256,256", "int8@bf16,256,256", "int4@fp16,48,60", "int4@fp32,128,128", "bf16@fp32,128,128"),
]


def compile_all(device: str, formats: list[str]) -> None:
    """Compile, and check what the kernels use."""
    found = compiled_by("tests.kernels.gpu.compile_all", device, *formats)
    apart = ("8-bit", "seal")  # of some formats
    assert len([used for used in found if not used["kernel"].endswith(apart)]) == 7 * len(formats)
    for used in found:
        assert used["shared"] <= SHARED_BYTES.get(device, OTHER_SHARED_BYTES[device[:2]]), used
        is_wide = "fp32" in used["kv"] or "256" in used["kv"] or device.startswith("gfx1")
        if used["kernel"].startswith("attend") and not is_wide and "spilled_in_loop" in used:
            assert used["spilled_in_loop"] <= SPILLED, f"registers spilled in the loop over keys: {used}"
        if used["kernel"] == "attend decode" and device.startswith("gfx9") and not is_wide:
            assert used["stack"] == 0, f"registers spilled: {used}"
        if used["kernel"] in ("write_kv", "gather_dense") and "fused" in used:
            assert used["fused"] == 0, f"a product and a sum are rounded once, so bits change: {used}"


@pytest.mark.parametrize(
    ("device", "formats"),
    [
        pytest.param("sm80", FEW[:1], marks=pytest.mark.long),
        ("sm90", [FEW[0], FEW[3]]),
        pytest.param("sm90", FEW[1:3], marks=pytest.mark.long),
    ],
)
def test_kernels_compile(device: str, formats: list[str]) -> None:  # D149
    compile_all(device, formats)


def test_kernels_compile_for_amd() -> None:
    compile_all("gfx942", ["int4"])


def latents(device: str, formats: list[str]) -> None:
    """Compile attention over latents; its tiles of many rows may spill some on sm90, as counted."""
    found = compiled_by("tests.kernels.gpu.compile_all", device, *(f"latents:{kv}" for kv in formats))
    assert len(found) == 2 * len(formats)
    for used in found:
        assert used["shared"] <= SHARED_BYTES.get(device, OTHER_SHARED_BYTES[device[:2]]), used
        if used["kernel"] == "attend_latent decode" and "spilled_in_loop" in used and "bf16/" in used["kv"]:
            assert used["stack"] == 0, f"registers spilled: {used}"


def test_attention_over_latents_compiles() -> None:
    latents("sm90", ["bf16/int4_g64"])


@pytest.mark.long
@pytest.mark.parametrize("device", ["sm80", "sm89", "sm90", "sm100", "gfx942"])
def test_attention_over_latents_compiles_for_every_format(device: str) -> None:
    latents(
        device, ["bf16", "bf16/fp8", "bf16/int8", "bf16/int4_g64", "bf16/int4", "int8", "bf16/int2@fp16,0,0"]
    )


@pytest.mark.long
@pytest.mark.parametrize("device", ["sm80", "sm86", "sm90", "gfx942"])
def test_kernels_compile_for_every_format(device: str) -> None:
    compile_all(device, MANY)


def test_nothing_is_pipelined_where_products_go_to_tensor_memory() -> None:
    """Its loops are longer with more stages."""
    assert shapes._shape("extend", "int4_g64/int4_g64", 128, "sm100", 64, 32).stages == 1
    assert shapes._shape("extend", "int4_g64/int4_g64", 128, "sm90", 64, 32).stages == 5


@pytest.mark.long
def test_kernels_compile_where_products_go_to_tensor_memory() -> None:
    compile_all("sm100", [name for name in MANY if name != "int2"])  # whose decode spills 16 bytes


@pytest.mark.long
@pytest.mark.parametrize("device", [name for name in AMD if name != "gfx942"])
def test_kernels_compile_for_every_amd_gpu_that_they_take(device: str) -> None:
    compile_all(device, [*FEW, "int4_g32_rot"])
