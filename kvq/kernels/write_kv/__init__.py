"""Quantize new K and V rows and scatter them into their slots."""

from kvq.kernels.gpu import support as gpu
from kvq.kernels.native import library
from kvq.kernels.spec import implementations, supported_everywhere
from kvq.kernels.write_kv import cpu, reference

KERNELS = implementations(
    "write_kv",
    {
        "reference": (reference.write_kv, supported_everywhere),
        "cpu": (cpu.write_kv, library.supports),
        "triton": (gpu.lazy("write_kv.triton", "write_kv"), gpu.supports_stored),
    },
)
