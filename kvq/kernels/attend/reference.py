"""Reference `attend`: attention of new tokens over blocks, for mixed prefill and decode batches."""

import torch
from torch import Tensor

from kvq.kernels.codec import rotate
from kvq.kernels.gather_dense.reference import gather_dense
from kvq.kernels.merge_partials.reference import merge_partials
from kvq.kernels.paged import PagedKV, SequenceBatch

_TILE_SCORES = 4 << 20  # scores computed at once, in elements: bounds memory on long contexts
_TILE_ROWS = 256  # query rows at most in one tile: keys past a tile's last row are skipped


def attend(
    q: Tensor,
    kv: PagedKV,
    batch: SequenceBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of every sequence's new tokens over its blocks.

    The new tokens' K and V must already be written. `q`: [tokens, q_heads, k_head_dim] in packed
    order; query head h reads KV head h * kv_heads // q_heads. `scale` multiplies the scores, then
    `softcap` bounds them as softcap * tanh(s / softcap). `window`: keys that a query sees, its own
    position included. `sinks`: [q_heads], logits that join the softmax without a value.

    Returns out [tokens, q_heads, v_head_dim] in q's dtype and lse fp32 [tokens, q_heads], natural
    log, sinks included.
    """
    tokens, q_heads, _ = q.shape
    fmt = kv.formats
    query = rotate(q) if fmt.k.rotated else q.float()
    out = torch.zeros(tokens, q_heads, fmt.v_head_dim, device=q.device)
    lse = torch.full((tokens, q_heads), float("-inf"), device=q.device)
    at = 0
    for i, (new, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        rows = slice(at, at + new)
        at += new
        if new:
            start = context - new
            oldest = 0 if window is None else max(0, start - window + 1)
            k, v = gather_dense(kv, batch.tables[i], oldest, context)
            out[rows], lse[rows] = _attend_one(
                query[rows] * scale, k, v, start - oldest, window=window, softcap=softcap
            )
    if sinks is not None:
        out, lse = merge_partials(out[None], lse[None], sinks)
    if fmt.v.rotated:
        out = rotate(out)
    return out.to(q.dtype), lse


def _attend_one(
    q: Tensor, k: Tensor, v: Tensor, start: int, *, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """One sequence: `q` fp32 [new, q_heads, dim] scaled, its first row at key position `start`."""
    new, q_heads, _ = q.shape
    kv_heads, keys, _ = k.shape
    rows_at_once = max(1, min(_TILE_ROWS, _TILE_SCORES // (q_heads * keys)))
    outs, lses = [], []
    for row in range(0, new, rows_at_once):
        tile = q[row : row + rows_at_once]
        first = start + row  # key position of the tile's first query
        end = first + tile.shape[0]
        begin = 0 if window is None else max(0, first - window + 1)
        position = torch.arange(first, end, device=q.device)[:, None]
        key = torch.arange(begin, end, device=q.device)
        visible = key <= position  # [rows, keys]
        if window is not None:
            visible &= key > position - window
        # [rows, kv_heads, group, dim] -> [kv_heads, group * rows, dim]
        folded = tile.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        scores = folded @ k[:, begin:end].transpose(1, 2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.unflatten(1, (-1, tile.shape[0])).masked_fill_(~visible, float("-inf"))
        top = scores.amax(dim=-1, keepdim=True)  # every row sees its own key: finite
        weights = torch.exp(scores - top)
        total = weights.sum(dim=-1, keepdim=True)  # [kv_heads, group, rows, 1]
        part = (weights / total).flatten(1, 2) @ v[:, begin:end]
        outs.append(part.unflatten(1, (-1, tile.shape[0])).permute(2, 0, 1, 3).flatten(1, 2))
        lses.append((top + total.log())[..., 0].permute(2, 0, 1).flatten(1, 2))
    return torch.cat(outs), torch.cat(lses)
