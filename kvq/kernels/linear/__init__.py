"""Linear layers with quantized weights: in codes of 4 or 8 bits, or in blocks of GGUF files."""

from importlib import import_module

from kvq.kernels.gpu import support as gpu
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.linear.reference import ReferenceLinear
from kvq.kernels.native import library
from kvq.kernels.spec import LINEAR_OPERATIONS, Kernel, Run, Supports, supported_everywhere

_TRITON = "kvq.kernels.linear.triton"  # imported when a weight is packed for it
_backends: dict[str, tuple[Run, Supports]] = {
    "reference": (ReferenceLinear, supported_everywhere),
    "cpu": (CpuLinear, library.supports_linear),
    "cpu-fp32": (ReferenceLinear, supported_everywhere),
    "triton": (lambda weight: import_module(_TRITON).TritonLinear(weight), gpu.supports_linear),
}
KERNELS = [
    Kernel(operation=operation, backend=backend, run=run, supports=supports)
    for operation in LINEAR_OPERATIONS
    for backend, (run, supports) in _backends.items()
]
