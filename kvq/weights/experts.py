"""Stacked experts of transformers' modules: all experts of a layer in two three-dimensional tensors.

Modules are recognized by their parameters, and their arithmetic by running a small copy: if a known form
reproduces its results, a kernel applies this form to the real weights.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn

from kvq.formats.ggml import GgmlType
from kvq.formats.weights import WeightFormat
from kvq.kernels import PlainWeight
from kvq.kernels.experts.cpu import CpuExperts
from kvq.kernels.experts.reference import Gating, Parts, ReferenceExperts, parts_of
from kvq.kernels.gated.reference import COMPILED, Activation
from kvq.weights.linear import ACTIVATIONS, Packed, replace_linear, runs_library_code

_WEIGHTS, _BIASES = {"gate_up_proj", "down_proj"}, {"gate_up_proj_bias", "down_proj_bias"}
_COUNT, _HIDDEN, _INNER, _ROWS = 3, 16, 12, 9  # sizes of the small copy
_TOLERANCE = 1e-4  # max|a - b| / max|b| of a row

Make = Callable[[str, int, Tensor], Parts]  # (name, expert, weight [out, in]) -> what is packed


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsForm:
    """Arithmetic of a module with stacked weights."""

    gating: Gating
    is_transposed: bool  # weights are [experts, in, out]
    is_interleaved: bool  # gate and up rows alternate

    def gate_up(self, mixed: Tensor) -> Tensor:
        """Return an expert's weight [2 n, in] or bias [2 n] with all gate rows before all up rows."""
        return torch.cat((mixed[::2], mixed[1::2])) if self.is_interleaved else mixed


class PackedExperts(Packed):
    """All experts of a layer, in one kernel."""

    def __init__(
        self,
        kernel: CpuExperts | ReferenceExperts,
        sizes: tuple[int, int, int],
        formats: set[WeightFormat | GgmlType],
    ) -> None:
        """`sizes`: experts, hidden size, inner size. `formats`: of the weights, without floats."""
        super().__init__()
        self.kernel = kernel
        self.num_experts, self.hidden_dim, self.intermediate_dim = sizes
        self._formats = formats

    @property
    def formats(self) -> set[WeightFormat | GgmlType]:
        """Formats of the weights, without floats."""
        return self._formats

    @property
    def weight_count(self) -> int:
        """Number of weights, including biases."""
        biases = self.kernel.bias_bytes // torch.float32.itemsize
        return int(3 * self.num_experts * self.hidden_dim * self.intermediate_dim + biases)

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Map [..., hidden] to [..., hidden], using each row's experts [rows, top] and their weights."""
        rows = hidden_states.reshape(-1, self.hidden_dim)
        output: Tensor = self.kernel(rows, chosen, weights)
        return output.view(hidden_states.shape)

    def extra_repr(self) -> str:
        names = ", ".join(sorted(fmt.name for fmt in self.formats)) or "floats"
        return f"{self.num_experts} x {self.hidden_dim} x {self.intermediate_dim}, {names}"


def packed_experts(model: nn.Module) -> dict[str, PackedExperts]:
    """Return a model's packed experts, keyed by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedExperts)}


def stacked_experts(model: nn.Module) -> dict[str, ExpertsForm]:
    """Return the forms of stacked experts, keyed by module name; unrecognized modules are left out.

    The model may be on the meta device.
    """
    proven: dict[object, ExpertsForm | None] = {}
    found = {}
    for name, module in model.named_modules():
        if not _has_parts(module):
            continue
        kind = type(module), _is_transposed(module), *_gatings(module)
        if kind not in proven:
            proven[kind] = _proven(module)
        if (form := proven[kind]) is not None:
            found[name] = form
    return found


def install_experts(model: nn.Module, forms: Mapping[str, ExpertsForm], make: Make, *, in_cpp: bool) -> None:
    """Replace the stacked experts named in `forms` with packed ones, one layer at a time.

    `in_cpp`: use C++ kernels, not the reference.
    """
    for name, form in forms.items():
        given: Any = model.get_submodule(name)
        parts = _parts(given, form, lambda own, *weight, name=name: make(f"{name}.{own}", *weight))
        kernel = (CpuExperts if in_cpp else ReferenceExperts)(**parts)
        flat = [part for weight in (*parts["gate_up"], *parts["down"]) for part in parts_of(weight)]
        formats = {part.fmt for part in flat if not isinstance(part, PlainWeight)}
        sizes = len(parts["down"]), kernel.hidden, flat[-1].in_features
        replace_linear(model, name, PackedExperts(kernel, sizes, formats))


def _parts(module: Any, form: ExpertsForm, make: Make) -> dict[str, Any]:
    """Return the arguments of expert kernels; `make` is called with a tensor's name inside the module."""
    first, last = module.gate_up_proj.detach(), module.down_proj.detach()
    return {
        "gate_up": [make("gate_up_proj", i, form.gate_up(_weight(own, form))) for i, own in enumerate(first)],
        "down": [make("down_proj", i, _weight(own, form)) for i, own in enumerate(last)],
        "gating": form.gating,
        "gate_up_bias": _bias(module, "gate_up_proj_bias", form.gate_up),
        "down_bias": _bias(module, "down_proj_bias", lambda bias: bias),
    }


def _weight(stored: Tensor, form: ExpertsForm) -> Tensor:
    """Return a stored weight as [out, in]."""
    return stored.T.contiguous() if form.is_transposed else stored


def _bias(module: Any, name: str, ordered: Callable[[Tensor], Tensor]) -> Tensor | None:
    bias: Tensor | None = getattr(module, name, None)
    return None if bias is None else torch.stack([ordered(own) for own in bias.detach().float()])


def _has_parts(module: nn.Module) -> bool:
    """Return True if a module contains only stacked gated experts' weights, any biases and an activation."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if not _WEIGHTS <= set(own) <= _WEIGHTS | _BIASES or not runs_library_code(module):
        return False
    others = [x for x in module.children() if next(x.parameters(), None) is not None or list(x.children())]
    first, last = own["gate_up_proj"].shape, own["down_proj"].shape
    if others or len(first) != 3 or len(last) != 3 or first[0] != last[0]:
        return False
    return _is_transposed(module) or (first[1] == 2 * last[2] and first[2] == last[1])


def _is_transposed(module: Any) -> bool:
    first, last = module.gate_up_proj.shape, module.down_proj.shape
    return bool(first[2] == 2 * last[1] and first[1] == last[2])


def _gatings(module: nn.Module) -> list[Gating]:
    """Return the possible gatings of a module, given its activation and its float attributes."""
    own = getattr(module, "act_fn", None)
    activation = Activation.SILU if own is None else ACTIVATIONS.get(type(own).__name__)
    if activation not in COMPILED:
        return []
    numbers = [value for value in vars(module).values() if isinstance(value, float)]
    plain = [] if own is None else [Gating(activation=activation)]
    cut = [Gating(activation=activation, limit=limit) for limit in numbers]
    turned = [Gating(limit=limit, slope=slope, shift=1.0) for limit, slope in permutations(numbers, 2)]
    return [*plain, *cut, *turned]


@torch.inference_mode()
def _proven(module: nn.Module) -> ExpertsForm | None:  # D171: recognized by parts, proven on a small copy
    """Return the form that reproduces the results of a small copy of the module, or None if no form does."""
    source = torch.Generator().manual_seed(0)
    small: Any = copy.copy(module)
    small.__dict__ |= {
        name: _COUNT
        for name, value in vars(module).items()
        if type(value) is int and value == len(module.get_parameter("down_proj"))
    }
    is_transposed = _is_transposed(module)
    weights = (_COUNT, 2 * _INNER, _HIDDEN), (_COUNT, _HIDDEN, _INNER)
    shapes: dict[str, tuple[int, ...]] = {
        name: (shape[0], shape[2], shape[1]) if is_transposed else shape
        for name, shape in zip(("gate_up_proj", "down_proj"), weights, strict=True)
    }
    shapes |= {"gate_up_proj_bias": (_COUNT, 2 * _INNER), "down_proj_bias": (_COUNT, _HIDDEN)}
    small.__dict__["_parameters"] = {
        name: None
        if own is None
        else nn.Parameter(torch.randn(shapes[name], generator=source, dtype=torch.float32), False)
        for name, own in module._parameters.items()
    }
    x = (
        torch.randn(_ROWS, _HIDDEN, generator=source, dtype=torch.float32)
        * torch.logspace(-1, 1, _ROWS, dtype=torch.float32)[:, None]
    )  # beyond limits
    chosen = torch.stack([torch.randperm(_COUNT, generator=source)[:2] for _ in x])
    given = x, chosen, torch.rand(_ROWS, 2, generator=source, dtype=torch.float32)
    run = inspect.unwrap(type(module).forward)
    try:
        wanted = run(small, *given)
    except Exception:  # noqa: BLE001 - code with another signature may raise anything
        return None
    if not isinstance(wanted, Tensor) or wanted.shape != x.shape:
        return None
    for gating, is_interleaved in product(_gatings(module), (False, True)):
        form = ExpertsForm(gating=gating, is_transposed=is_transposed, is_interleaved=is_interleaved)
        parts = _parts(small, form, lambda _, __, values: PlainWeight(values=values))
        error = (ReferenceExperts(**parts)(*given) - wanted).abs().amax(1)
        if (error <= _TOLERANCE * wanted.abs().amax(1)).all():
            return form
    return None
