"""Attention of new tokens over quantized blocks."""

from functools import partial

from kvq.kernels.attend import cpu, reference
from kvq.kernels.gpu import support as gpu
from kvq.kernels.native import library
from kvq.kernels.spec import implementations, supported_everywhere

_triton = gpu.lazy("attend.triton.attend", "attend")
KERNELS = implementations(
    "attend",
    {
        "reference": (reference.attend, supported_everywhere),
        "cpu": (cpu.attend, library.supports),
        "cpu-fp32": (partial(cpu.attend, exact=True), library.supports),
        "triton": (_triton, gpu.supports),
        "triton-8bit": (partial(_triton, rounded=True), gpu.supports_8bit),
    },
)
