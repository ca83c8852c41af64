"""Types of the kernel registry: kernels, layer shapes, devices, and the result of a support check."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvq.formats import Code, LayerFormats
from kvq.formats.ggml import GgmlType
from kvq.formats.weights import WeightCode, WeightFormat

LINEAR_OPERATIONS = ("linear_w4", "linear_w8", "linear_blocks")
# Codes that compiled kernels read and write, in addition to grouped codes of every width.
_COMPILED = (Code.FP32, Code.BF16, Code.FP16, Code.FP8, Code.INT8)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpec:
    """Properties of a layer's attention on which the choice of a kernel depends."""

    formats: LayerFormats
    q_heads: int
    kv_heads: int
    block_size: int  # tokens
    is_staged: bool = False  # whether attention runs over parts of the keys

    def __str__(self) -> str:
        return f"K {self.formats.k.name}, V {self.formats.v.name}"

    def fits_compiled(self, most_dim: int) -> "Support":
        """Return no for codes without compiled kernels or heads above `most_dim` elements, else yes."""
        for code in (self.formats.k.code, self.formats.v.code):
            if not code.is_grouped and code not in _COMPILED:
                return Support(False, f"does not know the code {code}")
        if max(self.formats.k_head_dim, self.formats.v_head_dim) > most_dim:
            return Support(False, f"takes head dimensions up to {most_dim}")
        return Support(True)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSpec:
    """Shape of one quantized Linear layer."""

    fmt: WeightFormat | GgmlType
    in_features: int
    out_features: int

    @property
    def operation(self) -> str:
        """Name of the operation that runs the layer."""
        if isinstance(self.fmt, GgmlType):
            return "linear_blocks"
        return "linear_w4" if self.fmt.code in (WeightCode.INT4, WeightCode.INT3) else "linear_w8"

    def __str__(self) -> str:
        return f"{self.fmt.name} weights [{self.out_features}, {self.in_features}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Device properties on which kernels depend."""

    type: str  # "cpu", "mps" or "cuda" (in torch also for AMD GPUs)
    name: str
    capability: tuple[int, int] | None = None  # compute capability of an NVIDIA GPU
    gfx: str | None = None  # ROCm's name for the architecture of an AMD GPU: "gfx942"

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """Return the properties of a torch device."""
        if device.type != "cuda":
            return cls(type=device.type, name=device.type)
        name = torch.cuda.get_device_name(device)
        if torch.version.hip is None:
            return cls(type="cuda", name=name, capability=torch.cuda.get_device_capability(device))
        # On ROCm, torch's "capability" has the numbers of the gfx name: (9, 4) is not a compute capability.
        gfx = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return cls(type="cuda", name=name, gfx=gfx)

    @property
    def architecture(self) -> str:
        """Compilation target of GPU kernels, such as `sm90` or `gfx942`; otherwise, the device type."""
        if self.gfx is not None:
            return self.gfx
        return self.type if self.capability is None else "sm{}{}".format(*self.capability)

    @property
    def multiplies_e4m3fn(self) -> bool:
        """True if kernels may multiply FP8 codes directly; not on AMD GPUs, which differ in FP8 formats."""
        return self.capability is not None and self.capability >= (8, 9)


@dataclass(frozen=True, slots=True)
class Support:
    """Result of a support check: yes, or no with a reason."""

    yes: bool
    reason: str = ""
    is_missed: bool = True  # False if the backend is made for other devices, so its absence is not logged


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One implementation of an operation."""

    operation: str
    backend: str
    run: Callable[..., Any]
    supports: Callable[[Any, Device], Support]  # takes a KernelSpec, or a LinearSpec for Linear layers

    @property
    def is_triton(self) -> bool:
        """True for GPU kernels."""
        return self.backend.startswith("triton")


Run = Callable[..., Any]
Supports = Callable[[Any, Device], Support]


def supported_everywhere(spec: KernelSpec | LinearSpec, device: Device) -> Support:
    """Return yes: references run every format on every device, since they use plain arithmetic."""
    return Support(True)
