"""The kernels that draw compile for GPUs that are not at hand, and spill no registers."""

import pytest

from tests.kernels.draw.compile_draw import KERNELS
from tests.kernels.gpu.compiling import compiled_by


def compile_all(device: str, *dtypes: str) -> None:
    """Compile, and check that registers suffice."""
    found = compiled_by("tests.kernels.draw.compile_draw", device, *dtypes)
    assert len(found) == len(KERNELS) * len(dtypes)
    for used in found:
        assert used["stack"] == 0, f"registers spilled: {used}"


def test_kernels_compile() -> None:
    compile_all("sm90", "bf16")


@pytest.mark.long
@pytest.mark.parametrize("device", ["sm80", "sm86", "sm90"])
def test_kernels_compile_for_every_gpu(device: str) -> None:
    compile_all(device, "bf16", "fp32")
