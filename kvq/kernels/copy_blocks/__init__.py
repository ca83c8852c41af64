"""Copy whole blocks inside a pool."""

from kvq.kernels.copy_blocks import cpu, reference
from kvq.kernels.gpu import support as gpu
from kvq.kernels.native import library
from kvq.kernels.spec import implementations, supported_everywhere

KERNELS = implementations(
    "copy_blocks",
    {
        "reference": (reference.copy_blocks, supported_everywhere),
        "cpu": (cpu.copy_blocks, library.supports),
        "triton": (gpu.lazy("copy_blocks.triton", "copy_blocks"), gpu.supports_stored),
    },
)
