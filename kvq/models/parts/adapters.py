"""LoRA adapters in memory and in a step: in compiled layers, or around a model's own Linear layers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from kvq.errors import ModelError
from kvq.kernels.adapters.cpu import CpuAdapter, CpuFactors, CpuStepAdapters
from kvq.kernels.adapters.cpu import adapters as add_on_cpu
from kvq.kernels.adapters.reference import Factors
from kvq.kernels.adapters.reference import adapters as add


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """An adapter in memory, as the kernels of its model's device read it."""

    updates: Mapping[str, CpuFactors | Factors]  # of each Linear layer that it changes, by name
    compiled: CpuAdapter | None = None  # of the decoder layers, if they run in C++

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(update.nbytes for update in self.updates.values())


class StepAdapters:
    """Adapters of a step. `chosen`: int32 [tokens], indices of `adapters`, or -1 for the base model."""

    def __init__(self, adapters: Sequence[Adapter | None], chosen: Tensor) -> None:
        self._adapters, self._chosen = adapters, chosen
        self._made: CpuStepAdapters | None = None
        self._operations: dict[str, Callable[..., None]] = {}  # by layer

    def compiled(self, rows: int, wanted: Tensor | None) -> CpuStepAdapters:
        """Return them for layers that run in C++. `rows`: with padding; `wanted`: those whose logits are."""
        if self._made is None or not self._made.is_for(rows, wanted):
            own = [None if adapter is None else adapter.compiled for adapter in self._adapters]
            self._made = CpuStepAdapters(own, self._padded(rows), wanted)
        return self._made

    @contextmanager
    def applied(self, model: Any, rows: int) -> Iterator[None]:
        """Let the model's own Linear layers add the updates to their results. `rows`: with padding.

        Raises:
            ModelError: the model did not call a layer that an adapter changes.
        """
        chosen, thread = self._padded(rows), get_ident()
        names = {name for adapter in self._adapters if adapter is not None for name in adapter.updates}
        left, handles = set(names), []

        def update(name: str, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if get_ident() != thread:  # another engine's step
                return
            x, out = args[0].flatten(0, -2), output.flatten(0, -2).contiguous()
            self._adding(name)(out, x.to(out.dtype), chosen=chosen)
            if out.data_ptr() != output.data_ptr():
                output.copy_(out.view(output.shape))
            left.discard(name)

        try:
            for name in names:
                handles.append(model.get_submodule(name).register_forward_hook(partial(update, name)))
            yield
        finally:
            for handle in handles:
                handle.remove()
        if left:
            raise ModelError(f"this model does not run {min(left)} as a layer, so adapters can't change it")

    def _adding(self, name: str) -> Callable[..., None]:
        """Return the operation that adds a layer's updates, with its factors; kept, since steps repeat."""
        if name not in self._operations:
            updates: list[Any] = [own and own.updates.get(name) for own in self._adapters]
            if self._chosen.is_cuda:
                from kvq.kernels.adapters import triton  # not needed on CPUs

                self._operations[name] = partial(triton.adapters, factors=triton.StackedFactors(updates))
            else:
                is_compiled = any(isinstance(own, CpuFactors) for own in updates)
                self._operations[name] = partial(add_on_cpu if is_compiled else add, factors=updates)
        return self._operations[name]

    def _padded(self, rows: int) -> Tensor:
        return functional.pad(self._chosen, (0, rows - len(self._chosen)), value=-1)
