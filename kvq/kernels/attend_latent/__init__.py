"""Latent attention in its absorbed form: one stored row a token is key and value of all query heads."""

from functools import partial

from kvq.kernels.attend_latent import cpu, reference
from kvq.kernels.gpu import support as gpu
from kvq.kernels.native import library
from kvq.kernels.spec import implementations, supported_everywhere

KERNELS = implementations(
    "attend_latent",
    {
        "reference": (reference.attend_latent, supported_everywhere),
        "cpu": (cpu.attend_latent, library.supports_latent),
        "cpu-fp32": (partial(cpu.attend_latent, exact=True), library.supports_latent),
        "triton": (gpu.lazy("attend_latent.triton", "attend_latent"), gpu.supports_latent),
    },
)
