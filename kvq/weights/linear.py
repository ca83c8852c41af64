"""What takes a Linear layer's place: a kernel that multiplies by its weight, in codes or as it was."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvq.kernels import Device, LinearSpec, PlainWeight, QuantizedWeight, select
from kvq.kernels.linear.cpu import CpuLinear

ROUTERS = ("gate", "router", "shared_expert_gate")  # small layers that choose experts: never quantized


class PackedLinear(nn.Module):
    """A Linear layer for inference, whose weight a kernel keeps in an order of its own."""

    def __init__(
        self,
        weight: QuantizedWeight | PlainWeight,
        bias: Tensor | None,
        *,
        backend: str,
        kernel: Callable[[Tensor], Tensor],
    ) -> None:
        """`kernel`: one of that backend that holds the weight."""
        super().__init__()
        self.in_features = weight.in_features
        self.out_features = weight.out_features
        self.backend = backend
        self.kernel: Any = kernel
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight as the kernel keeps it."""
        return int(self.kernel.nbytes)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        output: Tensor = self.kernel(input.reshape(-1, self.in_features))
        if self.bias is not None:
            output = output + self.bias
        return output.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Shape and backend."""
        return f"{self.in_features}, {self.out_features}, {self.backend}"


class PlainLinear(PackedLinear):
    """One whose weight is no code, on a CPU."""

    def __init__(
        self, weight: PlainWeight, bias: Tensor | None, *, kernel: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """`kernel`: one that holds the weight already.

        Raises:
            UnsupportedKernel: the C++ kernels were not built.
        """
        super().__init__(weight, bias, backend="cpu", kernel=kernel or CpuLinear(weight))

    @property
    def weight(self) -> Tensor:
        """A copy of the weight, fp32 [out, in], for code that looks at it; the layer has its own."""
        values: Tensor = self.kernel.values()
        return values.float()


class QuantizedLinear(PackedLinear):
    """One over a quantized weight, by the best kernel for its device."""

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        device: torch.device,
        *,
        backend: str = "auto",
        kernel: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Hand the weight to a kernel, which may keep it in an order of its own.

        `kernel`: one of that backend that holds the weight already.

        Raises:
            UnsupportedKernel: the named backend has no kernel for this weight.
        """
        if kernel is None:
            spec = LinearSpec(
                fmt=weight.fmt, in_features=weight.in_features, out_features=weight.out_features
            )
            chosen = select(spec.operation, spec, Device.of(device), backend)
            backend, kernel = chosen.backend, chosen.run(weight.to(device))
        super().__init__(weight, None if bias is None else bias.to(device), backend=backend, kernel=kernel)
        self.fmt = weight.fmt

    def extra_repr(self) -> str:
        """Shape, backend and format."""
        return f"{super().extra_repr()}, {self.fmt.name}"


def hooks_of(module: nn.Module) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """What is called after a module and before it; empty while nobody looks."""
    return module._forward_hooks, module._forward_pre_hooks


def replace_linear(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the one called `name`, dots included."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, Linear layers as their kernels keep them."""
    others = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return others + sum(layer.nbytes for layer in packed_layers(model).values())


def weight_count(model: nn.Module) -> int:
    """Weights of all layers, packed ones included; a head that is a copy of the embedding is none."""
    others = sum(parameter.numel() for parameter in model.parameters())
    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    head = model.get_output_embeddings() if is_tied else None  # type: ignore[operator]
    layers = [layer for layer in packed_layers(model).values() if layer is not head]
    return others + sum(layer.in_features * layer.out_features for layer in layers)


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    """A model's Linear layers that kernels keep, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Those of them that are quantized."""
    return {name: layer for name, layer in packed_layers(model).items() if isinstance(layer, QuantizedLinear)}
