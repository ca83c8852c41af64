"""Centered store: subtracts calibrated centers from K and V before another store keeps them."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from kvq.cache.stores.base import Attended, LayerBatch, PagedStore, Views
from kvq.errors import ConfigError
from kvq.formats import Centers, LayerCenters
from kvq.formats.calibrated import AGAIN, HeadCenters
from kvq.geometry import LayerGeometry
from kvq.kernels import AttentionOptions, Device, KernelSpec, SequenceBatch, select
from kvq.kernels.codec import rotate
from kvq.kernels.paged import Rows
from kvq.kernels.rope_write.reference import Angles, LayerHeads


class _CenteredStore(PagedStore):  # D21: softmax is invariant to K's center; V's is added back
    """Store of K - c and V - d, where c and d are the centers of each KV head.

    All scores of a query are then lower by scale * q.c, which leaves the softmax unchanged and shifts the
    log-sum-exp, and the output is lower by d.
    """

    def __init__(
        self,
        inner: PagedStore,
        centers: LayerCenters,
        layer: LayerGeometry,
        *,
        q_heads: int,
        softcap: float | None,
        device: torch.device,
    ) -> None:
        """Raises:
        ConfigError: the model caps its scores, so the softmax would depend on the center, or the
            centers are for a different number of KV heads.
        """
        if centers.k is not None and softcap is not None:
            raise ConfigError(
                f"layer {layer.index}: the model caps attention scores at {softcap}, so K can't be centered; "
                f"leave its center out of the recipe"
            )
        self.inner, self.blocks = inner, inner.blocks
        self._k, self._v = (_tensor(rows, layer, device) for rows in (centers.k, centers.v))
        self._heads: tuple[LayerHeads, LayerHeads] | None = None  # of the layer; the second with the centers
        spec = KernelSpec(
            formats=inner.blocks.formats, q_heads=q_heads, kv_heads=layer.kv_heads, block_size=1
        )
        self._group = q_heads // layer.kv_heads
        self._merge = select("merge_partials", spec, Device.of(device)).run

    def batch_of(self, batches: Sequence[SequenceBatch]) -> LayerBatch:
        return self.inner.batch_of(batches)

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        return self.inner.write(*self._centered(k, v), slots)

    def write_joined(
        self, joined: Tensor, angles: Angles | None, heads: LayerHeads, slots: Tensor, bad: Tensor
    ) -> Tensor:
        if self._heads is None or self._heads[0] is not heads:
            self._heads = heads, replace(heads, centers=(self._k, self._v))
        return self.inner.write_joined(joined, angles, self._heads[1], slots, bad)

    def attend(self, q: Tensor, batch: LayerBatch, options: AttentionOptions) -> Attended:
        return self._restored(q, *self.inner.attend(q, batch, options.without_sinks()), options)

    def gather(
        self, tables: Tensor, start: int, end: int, *, unrotate: bool, out: Rows | None = None
    ) -> Rows:
        rows, formats = self.inner.gather(tables, start, end, unrotate=unrotate, out=out), self.blocks.formats
        for x, center, fmt in zip(rows, (self._k, self._v), (formats.k, formats.v), strict=True):
            if center is not None:
                whole = center if unrotate or not fmt.rotated else rotate(center)
                x += whole[:, None].to(x.dtype)
        return rows

    def worth_expanding(self, batch: LayerBatch, options: AttentionOptions) -> list[int]:
        return self.inner.worth_expanding(batch, options)

    def backend_of(self, operation: str) -> str:
        return self.inner.backend_of(operation)

    def over(self, views: Views) -> Self:
        other = copy(self)
        other.inner = self.inner.over(views)
        other.blocks = other.inner.blocks
        return other

    def write_blocks(self, k: Tensor, v: Tensor, blocks: Sequence[int]) -> None:
        self.inner.write_blocks(*self._centered_dense(k, v), blocks)

    def attend_with(
        self, q: Tensor, recent: Rows, batch: SequenceBatch, options: AttentionOptions
    ) -> Attended:
        rows = self._centered_dense(*recent)
        return self._restored(q, *self.inner.attend_with(q, rows, batch, options.without_sinks()), options)

    def _centered(self, k: Tensor, v: Tensor) -> Rows:
        """Subtract the centers from rows [any, tokens, kv_heads, dim]. Dtypes stay the same."""
        return (
            k if self._k is None else (k.float() - self._k).to(k.dtype),
            v if self._v is None else (v.float() - self._v).to(v.dtype),
        )

    def _centered_dense(self, k: Tensor, v: Tensor) -> Rows:
        """Subtract the centers from rows [any, kv_heads, tokens, dim]. The results have the same strides."""
        k, v = self._centered(k.transpose(1, 2), v.transpose(1, 2))
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()

    def _restored(self, q: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions) -> Attended:
        """Convert attention over centered rows, without sinks, to attention over the original rows.

        The result of an empty part stays (0, -inf).
        """
        if self._v is not None:
            added = out.float() + self._v.repeat_interleave(self._group, 0)
            out = added.masked_fill(torch.isneginf(lse)[..., None], 0.0).to(out.dtype)
        if self._k is not None:
            lse = lse + options.scale * (q.float() * self._k.repeat_interleave(self._group, 0)).sum(-1)
        if options.sinks is not None:
            merged, lse = self._merge(out[None], lse[None], options.sinks)
            out = merged.to(out.dtype)
        return out, lse


def with_centers(
    store: PagedStore,
    centers: Centers | None,
    layer: LayerGeometry,
    *,
    q_heads: int,
    softcap: float | None,
    device: torch.device,
) -> PagedStore:
    """Return a store that subtracts the recipe's centers, or `store` if the layer has no centers.

    Raises:
        ConfigError: K has a center and the model caps its scores, or the number of heads differs.
    """
    if centers is None or centers.layers[layer.index] == LayerCenters():
        return store
    own = centers.layers[layer.index]
    return _CenteredStore(store, own, layer, q_heads=q_heads, softcap=softcap, device=device)


def _tensor(rows: HeadCenters | None, layer: LayerGeometry, device: torch.device) -> Tensor | None:
    """Return the centers as fp32 [kv_heads, head_dim], or None without centers."""
    if rows is None:
        return None
    if len(rows) != layer.kv_heads:
        raise ConfigError(
            f"layer {layer.index} has {layer.kv_heads} KV heads, its centers {len(rows)}; {AGAIN}"
        )
    return torch.tensor(rows, dtype=torch.float32, device=device)
