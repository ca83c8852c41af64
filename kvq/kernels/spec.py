"""What a kernel is asked to support, and on which device."""

from dataclasses import dataclass

import torch

from kvq.formats import LayerFormats
from kvq.formats.weights import WeightCode, WeightFormat

LINEAR_OPERATIONS = ("linear_w4", "linear_w8")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpec:
    """The shape of one layer's attention, as far as it decides which kernels fit."""

    formats: LayerFormats
    q_heads: int
    kv_heads: int
    block_size: int  # tokens

    def __str__(self) -> str:
        return f"K {self.formats.k.name}, V {self.formats.v.name}"


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

    type: str  # "cpu", "cuda" or "mps"
    name: str
    capability: tuple[int, int] | None = None  # compute capability of a CUDA device

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """Describe a torch device."""
        if device.type == "cuda":
            return cls(
                type="cuda",
                name=torch.cuda.get_device_name(device),
                capability=torch.cuda.get_device_capability(device),
            )
        return cls(type=device.type, name=device.type)


@dataclass(frozen=True, slots=True)
class Support:
    """Yes, or no with a reason."""

    yes: bool
    reason: str = ""
    is_missed: bool = True  # False where the backend is made for other devices, so nobody misses it
