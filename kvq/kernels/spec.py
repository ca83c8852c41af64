"""Kernels of the registry, the layers and devices they are asked to support, and their answers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvq.formats import Code, LayerFormats
from kvq.formats.weights import WeightCode, WeightFormat

LINEAR_OPERATIONS = ("linear_w4", "linear_w8")
# What compiled kernels read and write beside grouped codes of every width.
_COMPILED = (Code.FP32, Code.BF16, Code.FP16, Code.FP8, Code.INT8)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpec:
    """The shape of one layer's attention, as far as it decides which kernels fit."""

    formats: LayerFormats
    q_heads: int
    kv_heads: int
    block_size: int  # tokens
    is_staged: bool = False  # whether attention is asked for parts of the keys

    def __str__(self) -> str:
        return f"K {self.formats.k.name}, V {self.formats.v.name}"

    def fits_compiled(self, most_dim: int) -> "Support":
        """No for codes that compiled kernels don't know, and for heads of more than `most_dim` elements."""
        for code in (self.formats.k.code, self.formats.v.code):
            if not code.is_grouped and code not in _COMPILED:
                return Support(False, f"does not know the code {code}")
        if max(self.formats.k_head_dim, self.formats.v_head_dim) > most_dim:
            return Support(False, f"takes head dimensions up to {most_dim}")
        return Support(True)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSpec:
    """The shape of one quantized Linear layer."""

    fmt: WeightFormat
    in_features: int
    out_features: int

    @property
    def operation(self) -> str:
        """The operation that runs it."""
        return "linear_w4" if self.fmt.code in (WeightCode.INT4, WeightCode.INT3) else "linear_w8"

    def __str__(self) -> str:
        return f"{self.fmt.name} weights [{self.out_features}, {self.in_features}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device as kernels see it."""

    type: str  # "cpu", "mps" or "cuda", which torch calls AMD GPUs, too
    name: str
    capability: tuple[int, int] | None = None  # compute capability of an NVIDIA GPU
    gfx: str | None = None  # what ROCm calls the architecture of an AMD GPU: "gfx942"

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """Describe a torch device."""
        if device.type != "cuda":
            return cls(type=device.type, name=device.type)
        name = torch.cuda.get_device_name(device)
        if torch.version.hip is None:
            return cls(type="cuda", name=name, capability=torch.cuda.get_device_capability(device))
        # Its numbers are in "capability", too: (9, 4) is no compute capability.
        gfx = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return cls(type="cuda", name=name, gfx=gfx)

    @property
    def architecture(self) -> str:
        """Return what GPU kernels are compiled for: `sm90`, `gfx942`; of others their type."""
        if self.gfx is not None:
            return self.gfx
        return self.type if self.capability is None else "sm{}{}".format(*self.capability)

    @property
    def multiplies_e4m3fn(self) -> bool:
        """True if kernels may multiply FP8 codes as they are: on AMD the format differs between GPUs."""
        return self.capability is not None and self.capability >= (8, 9)


@dataclass(frozen=True, slots=True)
class Support:
    """Yes, or no with a reason."""

    yes: bool
    reason: str = ""
    is_missed: bool = True  # False where the backend is made for other devices, so nobody misses it


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One implementation of one operation."""

    operation: str
    backend: str
    run: Callable[..., Any]
    supports: Callable[[Any, Device], Support]  # of a KernelSpec; of a LinearSpec for Linear layers

    @property
    def is_triton(self) -> bool:
        """True if it is one of the GPU kernels."""
        return self.backend.startswith("triton")


Run = Callable[..., Any]
Supports = Callable[[Any, Device], Support]


def supported_everywhere(spec: KernelSpec | LinearSpec, device: Device) -> Support:
    """Return yes: references run every format on every device, since they decode bytes by arithmetic."""
    return Support(True)
