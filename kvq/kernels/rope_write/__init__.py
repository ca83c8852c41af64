"""Heads normed, turned and stored: what lies between the QKV product and attention."""

from kvq.kernels.gpu import support as gpu
from kvq.kernels.rope_write import reference
from kvq.kernels.spec import implementations, supported_everywhere

KERNELS = implementations(
    "rope_write",
    {
        "reference": (reference.rope_write, supported_everywhere),
        "triton": (gpu.lazy("rope_write.triton", "rope_write"), gpu.supports),
    },
)
