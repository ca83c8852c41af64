"""Memory reconciliation: compares planned with allocated bytes, term by term.

Allocated bytes are computed from the tensors and from the layouts that kernels store. The process's
total memory, as reported by the system or the driver, is also logged, to show memory that no plan includes.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from kvq.cache import KVCache
from kvq.cache.memory import held_bytes
from kvq.cache.stores.expansion import LatentExpansion
from kvq.errors import ConfigError
from kvq.models import Model
from kvq.models.loading.footprint import planned_weights
from kvq.sizes import decimal
from kvq.sizing.memory import EXPERTS_TERM, KEPT_TERM, LINEAR_TERM, SCALES_TERM
from kvq.sizing.needs import bytes_of
from kvq.weights import ROUTERS, PackedExperts, PackedLinear
from kvq.weights.linear import own_embeddings

_log = logging.getLogger("kvq")
# D271: each term separately: 1% above 1 MB
TOLERANCE = 0.01  # relative, per term
SMALL = 1_000_000  # bytes; smaller terms are not checked
WHOLE_TOLERANCE = 0.03  # for the whole process, whose libraries vary


@dataclass(frozen=True, slots=True)
class _Line:
    """One term of the comparison, in bytes."""

    name: str
    planned: int
    found: int

    @property
    def off(self) -> float:
        """Excess of the actual over the planned bytes, as a share of the planned bytes."""
        return (self.found - self.planned) / self.planned if self.planned else float(bool(self.found))

    @property
    def is_wrong(self) -> bool:
        """True if the term is not small and is off by more than the tolerance."""
        return max(self.planned, self.found) > SMALL and abs(self.off) > TOLERANCE


@dataclass(frozen=True)
class _Reconciliation:
    """All terms of the comparison, and the total memory of the process (on a GPU, of PyTorch)."""

    lines: tuple[_Line, ...]
    whole: _Line

    @cached_property
    def wrong(self) -> list[_Line]:
        """Terms that are off by more than the tolerance."""
        return [line for line in self.lines if line.is_wrong]

    def report(self) -> None:
        """Log all terms, as a warning if any is wrong."""
        lines = (*self.lines, self.whole)
        told = ", ".join(f"{one.name} {decimal(one.found)} (planned {decimal(one.planned)})" for one in lines)
        if self.wrong:
            names = " and ".join(line.name for line in self.wrong)
            _log.warning("memory: %s; more than %.0f%% off the plan: %s", told, 100 * TOLERANCE, names)
        else:
            _log.info("memory: %s", told)


def reconcile(model: Model, cache: KVCache, num_blocks: list[int], before: int) -> _Reconciliation:
    """Compare a newly built engine's memory with its plan. `before`: bytes in use before it was built."""
    weights, layout = model.weights, model.layout
    spare = [held - planned for held, planned in zip(cache.num_blocks, num_blocks, strict=True)]
    found = found_weights(weights.model)
    planned = _planned(model, found)
    lines = [
        _Line(name, planned.get(name, 0), found.get(name, 0)) for name in dict.fromkeys([*planned, *found])
    ]
    pool = _Line("KV pool", bytes_of(layout, num_blocks), cache.nbytes - bytes_of(layout, spare))
    rest = before - weights.held_bytes
    whole = rest + sum(planned.values()) + pool.planned
    return _Reconciliation((*lines, pool), _Line("in all", whole, held_bytes(weights.device)))


def _planned(model: Model, found: Mapping[str, int]) -> Mapping[str, int]:
    """Return the planned bytes per term, or `found` for a model family without a plan."""
    try:
        return {term.name: term.nbytes for term in planned_weights(model.prepared)}
    except ConfigError:
        return found


def found_weights(model: nn.Module) -> dict[str, int]:
    """Return the bytes of all weights, grouped by the terms of a plan."""
    found = dict.fromkeys((LINEAR_TERM, SCALES_TERM, EXPERTS_TERM, KEPT_TERM), 0)
    head = model.get_output_embeddings()  # type: ignore[operator]
    found[KEPT_TERM] += sum(embedding.kernel.nbytes for embedding in own_embeddings(model))
    seen: set[int] = set()  # addresses of counted tensors
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            codes, scales = module.kernel.code_bytes, module.kernel.nbytes - module.kernel.code_bytes
            found[KEPT_TERM if module is head else LINEAR_TERM] += codes + (scales if module is head else 0)
            found[SCALES_TERM] += 0 if module is head else scales
        if isinstance(module, PackedExperts):
            codes, biases = module.kernel.code_bytes, module.kernel.bias_bytes
            found[EXPERTS_TERM] += codes
            found[SCALES_TERM] += module.kernel.nbytes - codes - biases
            found[KEPT_TERM] += biases
        if isinstance(module, LatentExpansion):
            found[LINEAR_TERM] += module.packed_bytes
        for own, parameter in module.named_parameters(recurse=False):
            where = id(parameter) if parameter.is_mkldnn else int(parameter.data_ptr())
            if where not in seen:
                seen.add(where)
                found[_term_of(name, module, own, parameter, head)] += (
                    parameter.numel() * parameter.element_size()
                )
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _term_of(name: str, module: nn.Module, own: str, parameter: Any, head: nn.Module | None) -> str:
    if parameter.dim() == 3:
        return EXPERTS_TERM
    is_linear = isinstance(module, LatentExpansion) or (
        isinstance(module, nn.Linear) and own == "weight" and module is not head
    )
    return LINEAR_TERM if is_linear and name.rpartition(".")[2] not in ROUTERS else KEPT_TERM
