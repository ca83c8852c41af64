"""torch's own attention over blocks that were dequantized into scratch memory."""

import torch
from torch import Tensor
from torch.nn import functional

from kvq.cache.kv_cache import KVCache
from kvq.cache.recent import put_over
from kvq.cache.scratch import DenseScratch
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.codec import rotate_by_product

Rows = tuple[Tensor, Tensor]  # K and V


def dense_attention(
    scratch: DenseScratch,
    cache: KVCache,
    layer: int,
    q: Tensor,
    batch: SequenceBatch,
    options: AttentionOptions,
    *,
    recent: Rows | None = None,
) -> Tensor | None:
    """Causal attention of each row's last tokens, without softcap or sinks.

    `q`: [batch, q_heads, count, k_head_dim]; `recent`: K and V of every row's last tokens as they
    came, [batch, kv_heads, some, dim]. Returns [batch, count, q_heads, v_head_dim]. A row's
    new tokens are the last of its `count` queries; those before are padding and give zero. Stored
    rows stay rotated: Q is rotated instead, and the output once. Returns None for windows over
    rows of unequal length, where the oldest blocks of some rows were given back.
    """
    count, lengths, formats = q.shape[2], batch.context_lens, cache.layer(layer).formats
    window = options.window
    longest, even = max(lengths), len(set(lengths)) == 1
    if window is not None and not even:
        return None
    start = options.oldest(longest - count)
    k, v = scratch.gather(
        cache, layer, batch.tables, start, longest, dtypes=(q.dtype, q.dtype), unrotate=False
    )
    for i, length in enumerate(lengths):
        k[i, :, length - start :] = 0  # slots past a row's end may decode to NaN
        v[i, :, length - start :] = 0
    if recent is not None:
        for x, exact, fmt in zip((k, v), recent, (formats.k, formats.v), strict=True):
            put_over(x, exact, lengths, start, rotated=fmt.rotated)
    if formats.k.rotated:
        q = rotate_by_product(q).to(q.dtype)  # its own inverse
    mask = (
        None if even and count == 1 and window is None else ~_hidden(lengths, count, start, options, q.device)
    )
    plain = even and start == 0 and count == longest and (window is None or window >= longest)
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=None if plain else mask, is_causal=plain, scale=options.scale, enable_gqa=True
    )
    if formats.v.rotated:
        out = rotate_by_product(out).to(q.dtype)
    out = out.transpose(1, 2)
    new = batch.query_lens
    if any(some != count for some in new):
        hidden = torch.arange(count)[None] < torch.tensor([[count - some] for some in new])
        out = out.masked_fill(hidden[..., None, None].to(q.device), 0.0)
    return out


def _hidden(
    lengths: tuple[int, ...], count: int, start: int, options: AttentionOptions, device: torch.device
) -> Tensor:
    """bool [batch or 1, 1, count, keys]: True where a query does not see a key, which begin at `start`."""
    ends = torch.tensor(sorted(set(lengths)) if len(set(lengths)) == 1 else lengths, device=device)
    query = ends[:, None, None] - count + torch.arange(count, device=device)[:, None]  # [rows, count, 1]
    key = torch.arange(start, max(lengths), device=device)
    return options.hides(query, key)[:, None]
