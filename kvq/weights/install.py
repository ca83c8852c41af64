"""Installation of packed layers into a model, separately or fused.

Fused layers share their input and run as one product, such as the query, key and value projections.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from kvq.kernels import BlockWeight, Device, Kernel, LinearSpec, PlainWeight, QuantizedWeight, Weight, select
from kvq.kernels.gated.reference import Activation
from kvq.kernels.linear.cpu import CpuLinear, CpuMLP
from kvq.kernels.ops import keep, packed_linear
from kvq.weights.linear import (
    ACTIVATIONS,
    PackedLinear,
    PlainLinear,
    QuantizedLinear,
    hooks_of,
    linear_at,
    replace_linear,
    runs_library_code,
)


@dataclass(frozen=True, slots=True, eq=False)
class _Computed:
    """A product with its input and thread, and the start indices of the parts that were not used yet."""

    input: Tensor
    output: Tensor
    thread: int
    left: set[int]

    def has(self, part: slice, x: Tensor) -> bool:
        """Return True if this product was computed from x in this thread and the part has not been used."""
        known = self.input
        return (
            part.start in self.left
            and x.data_ptr() == known.data_ptr()
            and x.shape == known.shape
            and x.stride() == known.stride()
            and self.thread == get_ident()
        )


class _Joined:
    """Product of several weights, computed when one of its parts is first called.

    The other parts are kept until each has been used for the same input. The input is kept too, which
    prevents its memory from being reused in the meantime. Threads that share a model compute their own
    products.
    """

    def __init__(self, weights: Sequence[Weight], kernel: Any) -> None:
        """`kernel`: kernel that multiplies by the concatenated weights."""
        self.kernel = kernel
        ends = [sum(weight.out_features for weight in weights[: i + 1]) for i in range(len(weights))]
        self.parts = [
            JoinedPart(self, slice(end - weight.out_features, end))
            for end, weight in zip(ends, weights, strict=True)
        ]
        self._kept: _Computed | None = None

    def take(self, part: slice, x: Tensor) -> Tensor:
        """Return one part of the product with x [rows, in]: a view [rows, out of the part]."""
        kept = self._kept
        if kept is None or not kept.has(part, x):
            kept = _Computed(x, self.kernel(x), get_ident(), {own.part.start for own in self.parts})
            self._kept = kept
        kept.left.discard(part.start)
        if not kept.left and self._kept is kept:
            self._kept = None
        return kept.output[:, part]


class _Beside:
    """Kernels of weights of several types that share their input, as one product."""

    def __init__(self, kernels: Sequence[Any]) -> None:
        self.kernels, self.in_features = kernels, kernels[0].in_features
        self.out_features = sum(kernel.out_features for kernel in kernels)
        self.nbytes = sum(kernel.nbytes for kernel in kernels)
        self.code_bytes = sum(kernel.code_bytes for kernel in kernels)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([kernel(x) for kernel in self.kernels], 1)


class JoinedPart:
    """Kernel of one of several weights that share their input."""

    def __init__(self, joined: _Joined, part: slice) -> None:
        self.joined = joined
        self.part = part

    @property
    def nbytes(self) -> int:
        """This weight's share of the packed bytes."""
        return self._share(self.joined.kernel.nbytes)

    @property
    def code_bytes(self) -> int:
        """This weight's share of the packed bytes, without scales."""
        return self._share(self.joined.kernel.code_bytes)

    def _share(self, nbytes: int) -> int:
        rows = self.part.stop - self.part.start
        return int(nbytes * rows // self.joined.kernel.out_features)

    def values(self) -> Tensor:
        """Return a copy of the part's rows of a float weight, [out, in]."""
        values: Tensor = self.joined.kernel.values()
        return values[self.part]

    def __call__(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out] of x's dtype, contiguous: torch rounds gelu of views differently."""
        return self.joined.take(self.part, x).contiguous()


_SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # max|a-b| / max|b| of a row

Weights = Mapping[str, Callable[[], Weight]]  # keyed by layer name; created when needed


def install(
    model: nn.Module, weights: Weights, device: torch.device, *, backend: str, dtype: torch.dtype
) -> None:
    """Replace the Linear layers named in `weights`; `dtype`: the model's computation dtype.

    Unquantized weights always use the C++ kernels.

    Raises:
        UnsupportedKernel: the named backend has no kernel for a weight.
    """
    parents: dict[str, list[str]] = {}
    for name in weights:
        parent, _, own = name.rpartition(".")
        parents.setdefault(parent, []).append(own)
    for parent, children in parents.items():
        made = {own: weights[f"{parent}.{own}" if parent else own]() for own in children}
        for own, layer in _layers(model.get_submodule(parent), made, device, backend, dtype).items():
            replace_linear(model, f"{parent}.{own}" if parent else own, layer)
        if parent:
            _fuse(model, parent, dtype)


def _layers(
    parent: nn.Module, weights: dict[str, Weight], device: torch.device, backend: str, dtype: torch.dtype
) -> dict[str, PackedLinear]:
    """Return the packed layers of one module; layers that share their input are fused into one product."""
    layers: dict[str, PackedLinear] = {}
    for names in _SHARED:
        group = [weights[name] for name in names if name in weights]
        if len(group) == len(names) and (kernel := _joined(group, device, backend)) is not None:
            own = "cpu" if isinstance(kernel, CpuLinear) else "triton"
            for name, weight, part in zip(names, group, _Joined(group, kernel).parts, strict=True):
                layers[name] = _layer(weight, linear_at(parent, name).bias, device, own, dtype, part)
    for name, weight in weights.items():
        if name not in layers:
            layers[name] = _layer(weight, linear_at(parent, name).bias, device, backend, dtype)
    return layers


def _layer(
    weight: Weight,
    bias: Tensor | None,
    device: torch.device,
    backend: str,
    dtype: torch.dtype,
    kernel: JoinedPart | None = None,
) -> PackedLinear:
    """Return the packed layer for a weight; `kernel`: a kernel that already contains the weight, or None."""
    if isinstance(weight, PlainWeight):
        return PlainLinear(weight, bias, kernel or CpuLinear(weight), dtype)
    bias = None if bias is None else bias.to(device)
    if kernel is not None:
        return QuantizedLinear(weight, bias, kernel, backend)
    chosen = _kernel_for(weight, device, backend)
    return QuantizedLinear(weight, bias, chosen.run(weight.to(device)), chosen.backend)


def _kernel_for(weight: QuantizedWeight | BlockWeight, device: torch.device, backend: str) -> Kernel:
    """Return the best kernel for the device, or the named backend's kernel."""
    spec = LinearSpec(fmt=weight.fmt, in_features=weight.in_features, out_features=weight.out_features)
    return select(spec.operation, spec, Device.of(device), backend)


def _joined(group: Sequence[Weight], device: torch.device, backend: str) -> Any:
    """Return a kernel that multiplies by several weights at once, or None if they can't be fused."""
    if len({weight.in_features for weight in group}) > 1:
        return None
    if not any(isinstance(weight, QuantizedWeight) for weight in group):
        blocks = [weight for weight in group if isinstance(weight, BlockWeight)]
        kernels = [_kernel_for(weight, device, backend) for weight in blocks]
        if all(kernel.backend == "cpu" for kernel in kernels):
            return CpuLinear(*group)
        if len(kernels) < len(group) or not all(kernel.is_triton for kernel in kernels):
            return None
        made = []
        for fmt, own in groupby(blocks, key=lambda weight: weight.fmt):
            rows = torch.cat([weight.rows for weight in own])
            made.append(kernels[0].run(BlockWeight(fmt=fmt, rows=rows.to(device))))
        return made[0] if len(made) == 1 else _Beside(made)
    coded = [weight for weight in group if isinstance(weight, QuantizedWeight) and weight.order is None]
    if len(coded) < len(group) or len({weight.fmt for weight in coded}) > 1:
        return None
    chosen = _kernel_for(coded[0], device, backend)
    if chosen.backend == "cpu":
        return CpuLinear(*coded)
    if chosen.is_triton:
        return chosen.run(QuantizedWeight.joined(coded).to(device))
    return None


class GatedMLP(nn.Module):
    """Gated MLP, down(activation(gate(x)) * up(x)), in one call; the layers keep their names."""

    def __init__(self, mlp: nn.Module, activation: Activation) -> None:
        """`mlp`: a module whose gate and up projections are fused."""
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            mlp.get_submodule(name) for name in ("gate_proj", "up_proj", "down_proj")
        )
        assert isinstance(self.gate_proj, PackedLinear), "joined"
        assert isinstance(self.down_proj, PackedLinear), "packed"
        self.in_features, self.out_features = self.gate_proj.in_features, self.down_proj.out_features
        self.act_fn = mlp.get_submodule("act_fn")
        self.kernel = CpuMLP(self.gate_proj.kernel.joined.kernel, self.down_proj.kernel, activation)
        self._kernel_number = keep(self.kernel)
        self._hooks = [hooks for own in self.children() for hooks in hooks_of(own)]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if any(self._hooks):  # hooks expect the layers to run
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]
        rows = x.reshape(-1, self.in_features)
        if torch.compiler.is_compiling():  # as in PackedLinear
            output: Tensor = packed_linear(rows, self._kernel_number, self.out_features)
        else:
            output = self.kernel(rows)
        return output.view(*x.shape[:-1], self.out_features)


@torch.inference_mode()
def _fuse(model: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Replace a gated MLP with a single call if the results agree on rows of all magnitudes."""
    mlp = model.get_submodule(name)
    gate, down = (getattr(mlp, own, None) for own in ("gate_proj", "down_proj"))
    activation = ACTIVATIONS.get(type(getattr(mlp, "act_fn", None)).__name__)
    if activation is None or not isinstance(gate, PackedLinear) or not isinstance(down, PackedLinear):
        return
    up = getattr(mlp, "up_proj", None)
    biased = any(getattr(layer, "bias", None) is not None for layer in (gate, up, down))
    if biased or down.backend != "cpu" or not isinstance(gate.kernel, JoinedPart):
        return
    if down.in_features * 2 != gate.kernel.joined.kernel.out_features or not runs_library_code(mlp):
        return
    fused = GatedMLP(mlp, activation)
    x = torch.randn(1, 5, gate.in_features, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    x = (x * torch.logspace(-1, 3, 5, dtype=torch.float32)[:, None]).to(dtype)  # beyond some clamps
    wanted, found = mlp(x), fused(x)
    if ((found - wanted).abs().amax(-1) <= _TOLERANCE[dtype] * wanted.abs().amax(-1)).all():
        replace_linear(model, name, fused)
