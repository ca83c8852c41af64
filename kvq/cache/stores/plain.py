"""Plain store: quantizes rows into blocks as they arrive."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from kvq.cache.stores.base import Attended, LayerBatch, PagedStore, Views
from kvq.kernels import AttentionOptions, Kernel, PagedKV, SequenceBatch
from kvq.kernels.decoder.cpu import CpuDecoder
from kvq.kernels.decoder.stack import StackLayer
from kvq.kernels.paged import Rows
from kvq.kernels.rope_write.reference import Angles, LayerHeads
from kvq.layout import Role

_CPP = ("cpu", "cpu-fp32")


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainStore(PagedStore):
    """Blocks of one layer group, written and read token by token."""

    blocks: PagedKV
    group: int  # layer group
    kernels: dict[str, Kernel]  # by operation; "attend" is `attend_latent` for a layer of latents

    def batch_of(self, batches: Sequence[SequenceBatch]) -> LayerBatch:
        return batches[self.group]

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        bad: Tensor = self.kernels["write_kv"].run(k, v, self.blocks, slots)
        return bad

    def write_joined(
        self, joined: Tensor, angles: Angles | None, heads: LayerHeads, slots: Tensor, bad: Tensor
    ) -> Tensor:
        self.kernels["rope_write"].run(joined, angles, self.blocks, slots, bad, heads)
        return turned_queries(joined, heads)

    def attend(self, q: Tensor, batch: LayerBatch, options: AttentionOptions) -> Attended:
        found: Attended = self.kernels["attend"].run(q, self.blocks, batch, options)
        return found

    def gather(
        self, tables: Tensor, start: int, end: int, *, unrotate: bool, out: Rows | None = None
    ) -> Rows:
        rows: Rows = self.kernels["gather_dense"].run(
            self.blocks, tables, start, end, unrotate=unrotate, out=out
        )
        return rows

    def stack_layer(self, decoder: CpuDecoder, options: AttentionOptions, angles: int) -> StackLayer | None:
        if not runs_in_cpp(self.kernels, "attend", "write_kv"):
            return None
        return StackLayer(
            decoder=decoder,
            kv=self.blocks,
            options=options,
            exact=self.backend_of("attend") == "cpu-fp32",
            group=self.group,
            angles=angles,
        )

    def backend_of(self, operation: str) -> str:
        return self.kernels[operation].backend

    def over(self, views: Views) -> Self:
        return replace(self, blocks=views[Role.SEALED])


def turned_queries(joined: Tensor, heads: LayerHeads) -> Tensor:
    """Return the queries that `rope_write` rotated in place, [tokens, q_heads, k_dim]."""
    dims = (len(joined), heads.q_heads, heads.k_dim)
    return joined.as_strided(dims, (joined.stride(0), heads.k_dim, 1))


def runs_in_cpp(kernels: dict[str, Kernel], *operations: str) -> bool:
    """Return True if C++ runs these operations of a layer without latents."""
    return "rope_write" in kernels and all(kernels[name].backend in _CPP for name in operations)
