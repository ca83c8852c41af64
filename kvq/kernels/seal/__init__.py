"""Quantize the blocks of a staged sequence that became old enough."""

from kvq.kernels.gpu import support as gpu
from kvq.kernels.native import library
from kvq.kernels.seal import cpu, reference
from kvq.kernels.spec import implementations, supported_everywhere

KERNELS = implementations(
    "seal",
    {
        "reference": (reference.seal, supported_everywhere),
        "cpu": (cpu.seal, library.supports),
        "triton": (gpu.lazy("seal.triton", "seal"), gpu.supports_stored),
    },
)
