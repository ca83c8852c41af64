"""Latent store, and attention over latents in whichever form takes less work for a sequence.

In absorbed form, each pair of a query row and a key takes two products of the latent's width. In expanded
form, stored latents are first expanded to the keys and values of all heads, one chunk at a time, which pays
off if many new tokens share the expansion. The results of chunks are merged by their log-sum-exp.

Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1 and appendix C.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.cache.stores.base import LayerBatch, LayerStore
from kvq.cache.stores.expansion import LatentExpansion
from kvq.cache.stores.plain import PlainStore
from kvq.geometry import LayerGeometry
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.attend.reference import attend_keys
from kvq.kernels.attend_latent.cpu import relative_speed
from kvq.kernels.merge_partials.reference import merge_partials

SCRATCH_BYTES = 64 << 20  # for the keys and values of one chunk
_STEP = 256  # chunk sizes are multiples of this number of keys
LEAST_NEW = 64  # minimum number of new tokens for which a sequence is expanded


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentStore(PlainStore):
    """Store of latents. For each token, V is a latent and K its key's rotary part, shared by all heads."""

    geometry: LayerGeometry

    def worth_expanding(self, batch: LayerBatch, options: AttentionOptions) -> list[int]:
        """Return the indices of sequences to expand; none on GPUs, where expansion saves no time."""
        assert isinstance(batch, SequenceBatch), "of a plain layer"
        if batch.tables.device.type != "cpu":
            return []
        backend = self.backend_of("attend")
        is_cpp = backend.startswith("cpu")
        rate = relative_speed(self.blocks, exact=backend == "cpu-fp32") if is_cpp else 1.0
        return [
            i
            for i, (new, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True))
            if pays(new, context - options.oldest(context - new), self.geometry, rate)
        ]


def attend_latents(
    store: LayerStore,
    q: Tensor,
    batches: Sequence[SequenceBatch],
    options: AttentionOptions,
    expansion: LatentExpansion,
) -> Tensor:
    """Attend with the heads' queries, [tokens, q_heads, k_dim + rotary], over latents already written.

    Returns [tokens, q_heads, v_dim], in q's dtype.
    """
    batch = store.batch_of(batches)
    if not (expanded := store.worth_expanding(batch, options)):
        out, _ = store.attend(expansion.absorbed(q), batch, options)
        return expansion.values(out)
    assert isinstance(batch, SequenceBatch), "of a plain layer"
    out = q.new_empty(q.shape[0], q.shape[1], expansion.dims.v_dim)
    for i, rows in zip(expanded, batch.rows_of(expanded), strict=True):
        out[rows] = _over_heads(store, q[rows], batch.only([i]), options, expansion)
    if others := [i for i, new in enumerate(batch.query_lens) if new and i not in expanded]:
        where = torch.cat([torch.arange(x.start, x.stop) for x in batch.rows_of(others)])
        found, _ = store.attend(expansion.absorbed(q[where]), batch.only(others), options)
        out[where] = expansion.values(found)
    return out


def pays(new: int, context: int, layer: LayerGeometry, rate: float) -> bool:  # D202
    """Return True if expanding takes less work for `new` tokens at the end of a context.

    `rate`: the number of absorbed-kernel products that take as long as one product in expanded form.
    """
    own = layer.expansion
    assert own is not None, "of latents"
    pairs = new * (context - new) + new * (new + 1) // 2
    absorbed = pairs * (layer.k_head_dim + 2 * layer.v_head_dim)
    over_heads = pairs * (layer.k_head_dim + own.k_dim + own.v_dim)
    multiplied_out = context * layer.v_head_dim * (own.k_dim + own.v_dim)
    return new >= LEAST_NEW and absorbed > rate * (over_heads + multiplied_out)


def _over_heads(
    store: LayerStore, q: Tensor, batch: SequenceBatch, options: AttentionOptions, expansion: LatentExpansion
) -> Tensor:
    """Attend over one sequence in chunks that fit the scratch memory: fp32 [new, q_heads, v_dim]."""
    [new], [context] = batch.query_lens, batch.context_lens
    start, dims = context - new, expansion.dims
    rotary = q.shape[2] - dims.k_dim
    each = expansion.q_heads * (2 * dims.k_dim + rotary + 2 * dims.v_dim) * 4  # bytes per key
    size = max(_STEP, SCRATCH_BYTES // each // _STEP * _STEP)
    query, plain = q.float() * options.scale, options.without_sinks()
    first = options.oldest(start) // _STEP * _STEP
    found: list[tuple[Tensor, Tensor]] = []
    for begin in range(first, context, size):
        begin, end = max(begin, options.oldest(start)), min(begin + size, context)
        rows = store.gather(batch.tables, begin, end, unrotate=True)
        k, v = expansion.expanded(*(x[0, 0].float() for x in rows))
        found = [_merged([*found, attend_keys(query, k, v, start, begin, plain)], None)]
    return _merged(found, options.sinks)[0]


def _merged(parts: list[tuple[Tensor, Tensor]], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    if len(parts) == 1 and sinks is None:
        return parts[0]
    outs, lses = (torch.stack(all_of) for all_of in zip(*parts, strict=True))
    return merge_partials(outs, lses, sinks)
