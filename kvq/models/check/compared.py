"""Caches beside a session's: how far attention over them is off, layer by layer, on the same inputs."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvq.cache.backend import CacheBackend
from kvq.cache.kv_cache import attended
from kvq.kernels import AttentionOptions, SequenceBatch

_TINY = 1e-30  # a norm of zero has no relative error


@dataclass(slots=True)
class Errors:
    """Running figures of one layer under one recipe."""

    total: float = 0.0
    largest: float = 0.0
    tokens: int = 0

    def update(self, got: Tensor, expected: Tensor) -> None:
        """Take in outputs, [tokens, q_heads, v_head_dim] both."""
        norm = expected.float().flatten(1).norm(dim=1).clamp(min=_TINY)
        error = (got.float() - expected.float()).flatten(1).norm(dim=1) / norm  # [tokens]
        self.total += float(error.double().sum())
        self.largest = max(self.largest, float(error.max()))
        self.tokens += error.shape[0]

    @property
    def mean(self) -> float:
        """Over all tokens."""
        return self.total / self.tokens


Found = dict[tuple[str, int], Errors]  # by the digest of a recipe, and layer


class ComparedCache:
    """A session's cache; everything written to it goes to others too, and they attend beside it."""

    def __init__(self, baseline: CacheBackend, others: dict[str, CacheBackend]) -> None:
        """`others`: by the digest of their recipe."""
        self._baseline = baseline
        self._others = others
        self.found: Found = defaultdict(Errors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._baseline, name)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        """Store new rows everywhere."""
        for other in self._others.values():
            other.write(layer, k, v, slots)
        return self._baseline.write(layer, k, v, slots)

    def attend(
        self, layer: int, q: Tensor, batch: SequenceBatch, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """The baseline's attention; how far the others are off it is kept."""
        out, lse = self._baseline.attend(layer, q, batch, options)
        for digest, other in self._others.items():
            same = (batch,) * len(other.num_blocks)  # all are written alike: every group has these tables
            self.found[digest, layer].update(attended(other, layer, q, same, options)[0], out)
        return out, lse
