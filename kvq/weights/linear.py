"""Packed Linear layers and embeddings, whose weights are stored by a kernel as codes or floats."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from kvq.formats.ggml import GgmlType
from kvq.formats.weights import WeightFormat
from kvq.kernels import BlockWeight, PlainWeight, QuantizedWeight, Weight
from kvq.kernels.gated.reference import Activation
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.ops import keep, looked_up_rows, packed_linear

ROUTERS = ("gate", "router", "shared_expert_gate", "wg")  # small layers that choose experts: never quantized

ACTIVATIONS = {  # keyed by the class name of transformers' module
    "SiLU": Activation.SILU,
    "SiLUActivation": Activation.SILU,
    "GELUTanh": Activation.GELU_TANH,
    "PytorchGELUTanh": Activation.GELU_TANH,
}

Kernel = Callable[[Tensor], Tensor]


class Packed(nn.Module):
    """Inference module whose weights are stored by a kernel in its own layout."""

    kernel: Any
    fmt: WeightFormat | GgmlType | None = None  # the weights' format; None for floats

    @property
    def formats(self) -> set[WeightFormat | GgmlType]:
        """Formats of the weights, without floats."""
        return set() if self.fmt is None else {self.fmt}

    @property
    def nbytes(self) -> int:
        """Size in bytes of the weights as stored by the kernel."""
        return int(self.kernel.nbytes)

    @property
    def weight_count(self) -> int:
        """Number of weights."""
        raise NotImplementedError


class PackedLinear(Packed):
    """Linear layer whose weight is stored by a kernel."""

    def __init__(self, weight: Weight, bias: Tensor | None, kernel: Kernel, backend: str) -> None:
        """`kernel` contains the weight and belongs to `backend`."""
        super().__init__()
        self.in_features = weight.in_features
        self.out_features = weight.out_features
        self.backend = backend
        self.kernel = kernel
        self._kernel_number = keep(kernel)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight_count(self) -> int:
        """Number of weights."""
        return self.in_features * self.out_features

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = input.reshape(-1, self.in_features)
        if torch.compiler.is_compiling():  # a graph contains operators, not objects
            output: Tensor = packed_linear(rows, self._kernel_number, self.out_features)
        else:
            output = self.kernel(rows)
        if self.bias is not None:
            output = output + self.bias
        return output.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.backend}"


class PlainLinear(PackedLinear):
    """Packed Linear layer with a float weight."""

    def __init__(self, weight: PlainWeight, bias: Tensor | None, kernel: Kernel, dtype: torch.dtype) -> None:
        """`dtype`: the layer's dtype; the kernel may store the weight in fewer bits."""
        super().__init__(weight, bias, kernel, "cpu")
        self._dtype = dtype

    @property
    def weight(self) -> Tensor:
        """Copy of the weight, [out, in], for inspection only."""
        values: Tensor = self.kernel.values()
        return values.to(self._dtype)


class QuantizedLinear(PackedLinear):
    """Packed Linear layer with a quantized weight."""

    fmt: WeightFormat | GgmlType

    def __init__(
        self, weight: QuantizedWeight | BlockWeight, bias: Tensor | None, kernel: Kernel, backend: str
    ) -> None:
        super().__init__(weight, bias, kernel, backend)
        self.fmt = weight.fmt

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.fmt.name}"


class Dense:
    """Product y = x W^T in torch with the weights of several layers that share their input."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        """Store the layers; call `join` before the first product."""
        self._layers = tuple(layers)
        self.in_features = layers[0].in_features
        self.out_features = sum(layer.out_features for layer in layers)
        self.transposed = torch.empty(0, dtype=torch.float32)

    def join(self) -> None:
        """Fuse the weights into one tensor; the layers' own weights become views of it."""
        if len(self._layers) == 1:
            self.transposed = self._layers[0].weight.detach().t()
            return
        joined = torch.cat([layer.weight.detach() for layer in self._layers])
        parts = joined.split([layer.out_features for layer in self._layers])
        for layer, part in zip(self._layers, parts, strict=True):
            layer.weight.data = part
        self.transposed = joined.t()

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out] of x's dtype."""
        return torch.mm(x, self.transposed)

    def added_to(self, bias: Tensor, x: Tensor) -> Tensor:
        """Return the product plus a bias [out], in one launch."""
        return torch.addmm(bias, x, self.transposed)


_HOOKS_OF_ALL = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks


def hooks_of(module: nn.Module) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Return a module's forward hooks and forward pre-hooks."""
    return module._forward_hooks, module._forward_pre_hooks


def runs_library_code(module: nn.Module) -> bool:  # D190
    """Return True if a module runs only library code: no foreign code, replaced `forward` or hooks.

    Code is located by its globals, as `functools.wraps` copies another function's module name.
    """
    code = (getattr(one, "__globals__", {}) for one in (type(module).forward, type(module).__call__))
    homes = {str(own.get("__name__")).partition(".")[0] for own in code}
    is_own = "forward" in module.__dict__ or any(hooks_of(module)) or any(_HOOKS_OF_ALL)
    return not is_own and homes <= {"torch", "transformers", "kvq"}


class PackedEmbedding(nn.Module):
    """Tied embedding that looks up rows in a head's weight, in the layout of the head's kernel."""

    def __init__(self, kernel: CpuLinear, dtype: torch.dtype, scale: Tensor | None) -> None:
        """`dtype`: dtype of the returned rows; `scale`: optional factor for the rows."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = kernel.out_features, kernel.in_features
        self.kernel = kernel
        self._kernel_number = keep(kernel)
        self.dtype = dtype
        self.scale = None if scale is None else scale.detach().to(dtype)

    @property
    def weight(self) -> Tensor:
        """Copy of the weight, [rows, dim], for inspection only."""
        values: Tensor = self.kernel.values()
        return values.to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """int64 [...] -> [..., dim]."""
        if torch.compiler.is_compiling():  # as in PackedLinear
            rows: Tensor = looked_up_rows(input, self._kernel_number, self.embedding_dim, self.dtype)
        else:
            rows = self.kernel.look_up(input, self.dtype)
        return rows if self.scale is None else rows * self.scale

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


@torch.inference_mode()
def is_plain_lookup(module: nn.Embedding) -> bool:
    """Return True if a trial shows that a module returns rows of its weight, perhaps times `embed_scale`."""
    if any(hooks_of(module)) or module.max_norm is not None:
        return False
    ids = torch.arange(module.num_embeddings)[:: max(1, module.num_embeddings // 3)]
    weight = torch.arange(module.num_embeddings * 2.0).remainder(997).view(-1, 2)
    weight = weight.to(module.weight.dtype)  # its own weight may be on meta
    rows, scale = functional.embedding(ids, weight), scale_of(module)
    wanted = rows if scale is None else rows * scale.to(rows.dtype)
    found = functional_call(module, {"weight": weight}, ids)
    return isinstance(found, Tensor) and torch.equal(found, wanted)


def scale_of(module: nn.Embedding) -> Tensor | None:
    """Return the factor that an embedding such as Gemma's applies to its rows, or None."""
    scale = getattr(module, "embed_scale", None)
    if scale is None or isinstance(scale, Tensor):
        return scale
    return torch.tensor(float(scale), dtype=torch.float32)


def linear_of(weight: Tensor) -> nn.Linear:
    """Return a Linear layer that uses a weight [out, in] without copying it."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def linear_at(model: nn.Module, name: str) -> nn.Linear:
    """Return the Linear layer at the dotted name `name`."""
    found = model.get_submodule(name)
    assert isinstance(found, nn.Linear), f"{name} is no Linear layer"
    return found


def replace_linear(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule at the dotted name `name` with `module`."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def weight_bytes(model: nn.Module) -> int:
    """Return the size in bytes of all parameters, with packed weights as stored by their kernels."""
    others = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    others += sum(int(embedding.kernel.nbytes) for embedding in own_embeddings(model))
    return others + sum(module.nbytes for module in model.modules() if isinstance(module, Packed))


def own_embeddings(model: nn.Module) -> "list[PackedEmbedding]":
    """Return a model's packed embeddings that share no head's weight."""
    heads = {id(module.kernel) for module in model.modules() if isinstance(module, Packed)}
    embeddings = (module for module in model.modules() if isinstance(module, PackedEmbedding))
    return [embedding for embedding in embeddings if id(embedding.kernel) not in heads]


def weight_count(model: nn.Module) -> int:
    """Return the number of weights, including packed ones, but without a head that copies the embedding."""
    others = sum(parameter.numel() for parameter in model.parameters())
    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    is_copy = is_tied and isinstance(model.get_input_embeddings(), nn.Embedding)  # type: ignore[operator]
    head = model.get_output_embeddings() if is_copy else None  # type: ignore[operator]
    packed = [module for module in model.modules() if isinstance(module, Packed) and module is not head]
    others += sum(one.num_embeddings * one.embedding_dim for one in own_embeddings(model))
    return others + sum(module.weight_count for module in packed)


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    """Return a model's packed Linear layers, keyed by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def weight_formats(model: nn.Module) -> set[WeightFormat | GgmlType]:
    """Return the formats of all quantized weights."""
    packed = (module for module in model.modules() if isinstance(module, Packed))
    return {fmt for module in packed for fmt in module.formats}


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return a model's quantized Linear layers, keyed by name."""
    return {name: layer for name, layer in packed_layers(model).items() if isinstance(layer, QuantizedLinear)}
