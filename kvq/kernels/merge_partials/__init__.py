"""Merge attention over parts of a context by log-sum-exp."""

from kvq.kernels.gpu import support as gpu
from kvq.kernels.merge_partials import cpu, reference
from kvq.kernels.native import library
from kvq.kernels.spec import implementations, supported_everywhere

KERNELS = implementations(
    "merge_partials",
    {
        "reference": (reference.merge_partials, supported_everywhere),
        "cpu": (cpu.merge_partials, library.supports),
        "triton": (gpu.lazy("merge_partials.triton", "merge_partials"), gpu.supports_stored),
    },
)
