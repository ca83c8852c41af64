"""Taking calibrated centers from K and V before they are stored, and putting them back."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.formats.calibrated import AGAIN, HeadCenters, LayerCenters
from kvq.geometry import LayerGeometry
from kvq.kernels import (
    AttentionOptions,
    Device,
    KernelSpec,
    PagedKV,
    SequenceBatch,
    StagedBatch,
    StagedKV,
    select,
)
from kvq.kernels.codec import rotate
from kvq.kernels.rope_write.heads import LayerHeads
from kvq.layout import LayerLayout


class Centering:
    """The centers of one layer on its device.

    What is stored is K - c and V - d. A query's scores all lack scale * q.c then, which leaves the
    softmax as it is and moves the log-sum-exp; the output lacks d.
    """

    def __init__(
        self,
        centers: LayerCenters,
        layer: LayerLayout,
        *,
        q_heads: int,
        softcap: float | None,
        device: torch.device,
    ) -> None:
        """Raises:
        ConfigError: the model caps its scores, so that softmax would see the center; or centers for
            another number of KV heads.
        """
        own, self._formats = layer.geometry, layer.formats
        if centers.k is not None and softcap is not None:
            raise ConfigError(
                f"layer {own.index}: the model caps attention scores at {softcap}, so K can't be centered; "
                f"leave its center out of the recipe"
            )
        self._k, self._v = (_tensor(rows, own, device) for rows in (centers.k, centers.v))
        self._heads: tuple[LayerHeads, LayerHeads] | None = None  # of the layer, and with the centers
        spec = KernelSpec(formats=self._formats, q_heads=q_heads, kv_heads=own.kv_heads, block_size=1)
        self._group = q_heads // own.kv_heads
        self._merge = select("merge_partials", spec, Device.of(device)).run

    def centered(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """K and V as they are stored: [tokens, kv_heads, dim], in their dtypes."""
        return (
            k if self._k is None else (k.float() - self._k).to(k.dtype),
            v if self._v is None else (v.float() - self._v).to(v.dtype),
        )

    def taken_from(self, heads: LayerHeads) -> LayerHeads:
        """The heads of a layer whose K and V lose their centers on their way into the blocks."""
        if self._heads is None or self._heads[0] is not heads:
            self._heads = heads, replace(heads, centers=(self._k, self._v))
        return self._heads[1]

    def attended(
        self,
        attend: Callable[..., tuple[Tensor, Tensor]],
        q: Tensor,
        kv: PagedKV | StagedKV,
        batch: SequenceBatch | StagedBatch,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """What the kernel `attend` would give over rows that were not centered."""
        out, lse = attend(q, kv, batch, options.without_sinks())
        return self.restored(q, out, lse, options)

    def restored(
        self, q: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """What attention would give over rows that were not centered.

        `q`: [tokens, q_heads, k_head_dim]; `out`: [tokens, q_heads, v_head_dim], without sinks; `lse`:
        fp32 [tokens, q_heads]. An empty part stays (0, -inf).
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

    def add_to(self, k: Tensor, v: Tensor, *, unrotate: bool) -> None:
        """Add the centers to gathered rows [sequences, kv_heads, tokens, dim], rotated or not, in place."""
        for x, center, fmt in ((k, self._k, self._formats.k), (v, self._v, self._formats.v)):
            if center is not None:
                whole = center if unrotate or not fmt.rotated else rotate(center)
                x += whole[:, None].to(x.dtype)


def _tensor(rows: HeadCenters | None, layer: LayerGeometry, device: torch.device) -> Tensor | None:
    """fp32 [kv_heads, head_dim]."""
    if rows is None:
        return None
    if len(rows) != layer.kv_heads:
        raise ConfigError(
            f"layer {layer.index} has {layer.kv_heads} KV heads, its centers {len(rows)}; {AGAIN}"
        )
    return torch.tensor(rows, dtype=torch.float32, device=device)
