"""torch's own attention over blocks that were dequantized into scratch memory."""

import torch
from torch import Tensor
from torch.nn import functional

from kvq.cache.folded_attention import MOST_QUERIES, can_fold, folded_attention
from kvq.cache.int4 import unrotated
from kvq.cache.recent import put_over
from kvq.cache.scratch import DenseScratch
from kvq.kernels import PagedKV, SequenceBatch

Rows = tuple[Tensor, Tensor]  # K and V


def attend_by_torch(
    scratch: DenseScratch,
    q: Tensor,
    kv: PagedKV,
    batch: SequenceBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    recent: Rows | None = None,
) -> Tensor | None:
    """The better of both ways for this step, or None where only kvq's own kernels know how.

    `q`: [batch, q_heads, count, k_head_dim]; `recent`: K and V of every row's last tokens as they
    came, [batch, kv_heads, some, dim]. Returns [batch, count, q_heads, v_head_dim].
    """
    count = q.shape[2]
    is_even = len(set(batch.context_lens)) == 1 and set(batch.query_lens) == {count}
    if is_even and count <= MOST_QUERIES and can_fold(kv):
        return folded_attention(
            scratch,
            q,
            kv,
            batch,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            recent=recent,
        )
    if softcap is not None or sinks is not None:
        return None
    return dense_attention(scratch, q, kv, batch, scale=scale, window=window, recent=recent)


def dense_attention(
    scratch: DenseScratch,
    q: Tensor,
    kv: PagedKV,
    batch: SequenceBatch,
    *,
    scale: float,
    window: int | None,
    recent: Rows | None = None,
) -> Tensor | None:
    """Causal attention of each row's last tokens.

    `q`: [batch, q_heads, count, k_head_dim]; returns [batch, count, q_heads, v_head_dim]. A row's
    new tokens are the last of its `count` queries; those before are padding and give zero. Stored
    rows stay rotated: Q is rotated instead, and the output once. Returns None for windows over
    rows of unequal length, where the oldest blocks of some rows were given back.
    """
    count, lengths = q.shape[2], batch.context_lens
    longest, even = max(lengths), len(set(lengths)) == 1
    if window is not None and not even:
        return None
    start = 0 if window is None else max(0, longest - count - window + 1)
    k, v = scratch.gather(kv, batch.tables, start, longest, dtypes=(q.dtype, q.dtype), unrotate=False)
    for i, length in enumerate(lengths):
        k[i, :, length - start :] = 0  # slots past a row's end may decode to NaN
        v[i, :, length - start :] = 0
    if recent is not None:
        for x, exact, fmt in zip((k, v), recent, (kv.formats.k, kv.formats.v), strict=True):
            put_over(x, exact, lengths, start, rotated=fmt.rotated)
    if kv.formats.k.rotated:
        q = unrotated(q).to(q.dtype)  # its own inverse
    mask = (
        None if even and count == 1 and window is None else _visible(lengths, count, start, window, q.device)
    )
    plain = even and start == 0 and count == longest and (window is None or window >= longest)
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=None if plain else mask, is_causal=plain, scale=scale, enable_gqa=True
    )
    if kv.formats.v.rotated:
        out = unrotated(out).to(q.dtype)
    out = out.transpose(1, 2)
    new = batch.query_lens
    if any(some != count for some in new):
        hidden = torch.arange(count)[None] < torch.tensor([[count - some] for some in new])
        out = out.masked_fill(hidden[..., None, None].to(q.device), 0.0)
    return out


def _visible(
    lengths: tuple[int, ...], count: int, start: int, window: int | None, device: torch.device
) -> Tensor:
    """bool [batch or 1, 1, count, keys]: True where a query sees a key, which begin at `start`."""
    ends = torch.tensor(sorted(set(lengths)) if len(set(lengths)) == 1 else lengths, device=device)
    query = ends[:, None, None] - count + torch.arange(count, device=device)[:, None]  # [rows, count, 1]
    key = torch.arange(start, max(lengths), device=device)
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    return seen[:, None]
