"""Staged store: keeps the most recent and the first tokens unquantized, and all others in sealed blocks.

Before it attends, a step seals the blocks that become old enough in this step. Only the positions of a token
and a query determine which form of the token the query sees, so it makes no difference whether tokens arrived
in chunks, from a prefix, from the tiers or after a recomputation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from kvq.cache.stores.base import Attended, LayerBatch, Views
from kvq.cache.stores.plain import PlainStore, runs_in_cpp, turned_queries
from kvq.formats import ExactTokens
from kvq.kernels import AttentionOptions, Kernel, SequenceBatch, StagedBatch, StagedKV
from kvq.kernels.attend.options import parts_of
from kvq.kernels.decoder.cpu import CpuDecoder
from kvq.kernels.decoder.stack import StackLayer
from kvq.kernels.gpu.support import lazy
from kvq.kernels.paged import Rows, as_tokens, plain_blocks, tables_of_tokens
from kvq.kernels.rope_write.reference import Angles, LayerHeads
from kvq.layout import Role

_TOGETHER = lazy("attend.triton.attend", "attend_staged")


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedStore(PlainStore):  # D23: recent tokens and sinks have separate layer groups
    """Store with a staging area: tokens wait unquantized in recent blocks until their block is sealed."""

    kv: StagedKV  # `blocks`, and the staging area, which the writing kernels use
    num_kinds: int  # kinds of layers; groups are ordered: all sealed, all recent, all sinks
    sees_old: bool  # False if a window ends within the recent tokens, so that no block may be sealed

    def batch_of(self, batches: Sequence[SequenceBatch]) -> LayerBatch:
        recent = self.group + self.num_kinds
        return StagedBatch(
            sealed=batches[self.group],
            recent=batches[recent],
            sinks=None if self.kv.sinks is None else batches[recent + self.num_kinds],
        )

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        bad: Tensor = self.kernels["write_kv"].run(k, v, self.kv.recent, slots)
        return bad

    def write_joined(
        self, joined: Tensor, angles: Angles | None, heads: LayerHeads, slots: Tensor, bad: Tensor
    ) -> Tensor:
        self.kernels["rope_write"].run(joined, angles, self.kv.recent, slots, bad, heads)
        return turned_queries(joined, heads)

    def seal(self, batch: StagedBatch) -> None:
        """Quantize the blocks that become old enough with the step's new tokens, already written."""
        self.kernels["seal"].run(self.kv, batch)

    def attend(self, q: Tensor, batch: LayerBatch, options: AttentionOptions) -> Attended:
        assert isinstance(batch, StagedBatch), "see batch_of"
        if not self.sees_old:
            found: Attended = self.kernels["attend_recent"].run(q, self.kv.recent, batch.recent, options)
            return found
        self.seal(batch)
        return _attend_all_forms(self.kernels, q, self.kv, batch, options)

    def stack_layer(self, decoder: CpuDecoder, options: AttentionOptions, angles: int) -> StackLayer | None:
        if not runs_in_cpp(self.kernels, "attend", "write_kv", "seal"):
            return None
        return StackLayer(
            decoder=decoder,
            kv=self.kv,
            options=options,
            exact=self.backend_of("attend") == "cpu-fp32",
            group=self.group,
            angles=angles,
            sees_old=self.sees_old,
            num_kinds=self.num_kinds,
        )

    def over(self, views: Views) -> Self:
        return replace(self, blocks=views[Role.SEALED], kv=staged_views(views, self.kv.exact))


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeBlockStore(PlainStore):
    """Store for a staged recipe that takes only complete blocks. Newer tokens are kept elsewhere.

    `KvqCache` keeps each row's last tokens itself, and chunks for LMCache have no such tokens.
    """

    exact: ExactTokens

    def write_blocks(self, k: Tensor, v: Tensor, blocks: Sequence[int]) -> None:
        own = plain_blocks(k, v, self.blocks.block_size)
        end = [len(blocks) * self.blocks.block_size]
        step = SequenceBatch.of([range(len(blocks))], [], end, end, k.device)
        sealed = SequenceBatch.of([blocks], [], end, end, k.device)
        kv = StagedKV(sealed=self.blocks, recent=own, sinks=None, exact=ExactTokens())
        self.kernels["seal"].run(kv, StagedBatch(sealed=sealed, recent=step, sinks=None))

    def attend_with(
        self, q: Tensor, recent: Rows, batch: SequenceBatch, options: AttentionOptions
    ) -> Attended:
        own, name = as_tokens(recent), (tables_of_tokens, recent[0].shape, recent[0].stride())
        if name not in batch.kept:
            batch.kept[name] = replace(batch, tables=tables_of_tokens(recent, batch.context_lens))
        both = StagedBatch(sealed=batch, recent=batch.kept[name], sinks=None)
        kv = StagedKV(sealed=self.blocks, recent=own, sinks=None, exact=self.exact)
        return _attend_all_forms(self.kernels, q, kv, both, options)


def staged_views(views: Views, exact: ExactTokens) -> StagedKV:
    """Return the blocks of a staged layer. `exact`: numbers of exact tokens, in complete blocks."""
    return StagedKV(
        sealed=views[Role.SEALED], recent=views[Role.RECENT], sinks=views.get(Role.SINKS), exact=exact
    )


def _attend_all_forms(
    kernels: dict[str, Kernel], q: Tensor, kv: StagedKV, batch: StagedBatch, options: AttentionOptions
) -> Attended:
    """Attend over sealed blocks, recent blocks and sinks, and merge the results by their log-sum-exp."""
    if kernels["attend"].backend == kernels["attend_recent"].backend == "triton":
        together: Attended = _TOGETHER(q, kv, batch, options)  # D392
        return together
    own = options.without_sinks()
    sealed, recent, sinks = (own.of_part(part) for part in parts_of(kv.exact, kv.sealed.block_size))
    query = q.float() if q.device.type == "cpu" else q  # on CPUs, parts stay fp32 until they are merged
    attend_recent = kernels["attend_recent"].run
    parts = [
        kernels["attend"].run(query, kv.sealed, batch.sealed, sealed),
        attend_recent(query, kv.recent, batch.recent, recent),
    ]
    if kv.sinks is not None:
        parts.append(attend_recent(query, kv.sinks, batch.sinks, sinks))
    outs, lses = (torch.stack(all_of) for all_of in zip(*parts, strict=True))
    out, lse = kernels["merge_partials"].run(outs, lses, options.sinks)
    return out.to(q.dtype), lse
