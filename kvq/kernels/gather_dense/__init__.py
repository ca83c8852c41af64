"""Dequantize blocks of a sequence into dense K and V."""

from kvq.kernels.gather_dense import cpu, reference
from kvq.kernels.gpu import support as gpu
from kvq.kernels.native import library
from kvq.kernels.spec import implementations, supported_everywhere

KERNELS = implementations(
    "gather_dense",
    {
        "reference": (reference.gather_dense, supported_everywhere),
        "cpu": (cpu.gather_dense, library.supports),
        "triton": (gpu.lazy("gather_dense.triton", "gather_dense"), gpu.supports_stored),
    },
)
