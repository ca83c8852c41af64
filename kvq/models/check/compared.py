"""Comparison caches of a session, which measure each layer's attention error on the same inputs."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from kvq.cache.backend import CacheBackend
from kvq.cache.stores.base import Attended, LayerBatch, LayerStore
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.models.run.session import Session

_TINY = 1e-30  # a norm of zero has no relative error


@dataclass(slots=True)
class Errors:
    """Running error statistics of one layer with one recipe."""

    total: float = 0.0
    largest: float = 0.0
    tokens: int = 0

    def update(self, got: Tensor, expected: Tensor) -> None:
        """Add the errors of `got` relative to `expected`, both [tokens, q_heads, v_head_dim]."""
        norm = expected.float().flatten(1).norm(dim=1).clamp(min=_TINY)
        error = (got.float() - expected.float()).flatten(1).norm(dim=1) / norm  # [tokens]
        self.total += float(error.double().sum())
        self.largest = max(self.largest, float(error.max()))
        self.tokens += error.shape[0]

    @property
    def mean(self) -> float:
        """Mean error over all tokens."""
        return self.total / self.tokens


Found = dict[tuple[str, int], Errors]  # keyed by (recipe digest, layer)


def compare(session: Session, others: dict[str, CacheBackend]) -> Found:
    """Let a session attend over other caches too, and return the errors, which grow with every pass.

    `others`: the other caches, keyed by recipe digest.
    """
    found: Found = defaultdict(Errors)
    if others:
        session.cache = cast(CacheBackend, _ComparedCache(session.cache, others, found))
    return found


class _ComparedCache:
    """Wrapper of a session's cache that also writes to other caches and attends over them for comparison."""

    def __init__(self, baseline: CacheBackend, others: dict[str, CacheBackend], found: Found) -> None:
        self._baseline = baseline
        self.stores = {
            layer: _ComparedStore(layer, store, others, found) for layer, store in baseline.stores.items()
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._baseline, name)


class _ComparedStore(LayerStore):
    """One layer of the baseline cache and of the other caches."""

    def __init__(
        self, layer: int, baseline: LayerStore, others: dict[str, CacheBackend], found: Found
    ) -> None:
        self._baseline = baseline
        self._others = [
            (cache.stores[layer], len(cache.num_blocks), found[digest, layer])
            for digest, cache in others.items()
        ]

    def batch_of(self, batches: Sequence[SequenceBatch]) -> LayerBatch:
        return self._baseline.batch_of(batches)

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        for other, _, _ in self._others:
            other.write(k, v, slots)
        return self._baseline.write(k, v, slots)

    def attend(self, q: Tensor, batch: LayerBatch, options: AttentionOptions) -> Attended:
        """Return the baseline's attention output, and record the errors of the other caches."""
        assert isinstance(batch, SequenceBatch), "the baseline is not staged"
        out, lse = self._baseline.attend(q, batch, options)
        for other, num_groups, errors in self._others:
            same = (batch,) * num_groups  # all caches get the same writes, so every group has these tables
            errors.update(other.attend(q, other.batch_of(same), options)[0], out)
        return out, lse
