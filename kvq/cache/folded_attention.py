"""Attention of a few new tokens over int4 blocks, in which codes are never scaled.

With x = scale * code + minimum per group, q . x = scale * (q . code) + minimum * sum(q): the K scale
goes to the scores, the V scale to the probabilities, and only codes become floats.
"""

import torch
from torch import Tensor

from kvq.cache.int4 import unrotated
from kvq.cache.scratch import DenseScratch
from kvq.formats import Code, Grouped
from kvq.kernels import PagedKV, PagedRows, SequenceBatch

MOST_QUERIES = 16  # new tokens per row; beyond, dequantizing once costs less than it saves
_TILE = 1 << 20  # codes made floats at a time, so that they stay in the CPU's cache


def can_fold(kv: PagedKV) -> bool:
    """True for int4 on a CPU whose groups are whole rows or half rows."""
    fmt = kv.formats
    return kv.k.codes.device.type == "cpu" and all(
        f.code is Code.INT4 and isinstance(f.scale, Grouped) and f.scale.group_size in (dim, dim // 2)
        for f, dim in ((fmt.k, fmt.k_head_dim), (fmt.v, fmt.v_head_dim))
    )


def folded_attention(
    scratch: DenseScratch,
    q: Tensor,
    kv: PagedKV,
    batch: SequenceBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    recent: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention of the last `count` tokens of rows of equal length; see `kernels.attend`.

    `q`: [batch, q_heads, count, k_head_dim]; `recent`: K and V of the rows' last tokens as they came,
    [batch, kv_heads, some, dim], which take the place of the stored ones. Returns
    [batch, count, q_heads, v_head_dim].
    """
    rows, q_heads, count, _ = q.shape
    length, heads = batch.context_lens[0], kv.k.codes.shape[1]
    oldest = 0 if window is None else max(0, length - count - window + 1)
    first = oldest // kv.block_size
    blocks = batch.tables[:, first : -(-length // kv.block_size)].long()
    hidden = _hidden(blocks.shape[1] * kv.block_size, first * kv.block_size, length, count, window)
    folded = (unrotated(q) if kv.formats.k.rotated else q.float()).mul(scale)
    folded = folded.unflatten(1, (heads, -1))  # [batch, kv_heads, query heads of each, count, dim]
    sink = None if sinks is None else sinks.float().view(heads, -1, 1, 1)
    out = torch.empty(rows, q_heads, count, kv.formats.v_head_dim)
    unused = length - first * kv.block_size  # slots from here on may decode to NaN
    plain = q.float().mul(scale).unflatten(1, (heads, -1))  # not rotated, as recent rows are not
    exact_part = None if recent is None else torch.empty_like(out)
    tall = max(1, _TILE // max(1, heads * hidden.shape[1] * q.shape[3]))
    for at in range(0, rows, tall):
        some = blocks[at : at + tall]
        scores = _scores(scratch, folded[at : at + tall], kv.k, some)
        if recent is not None:
            last = min(recent[0].shape[2], unused)
            exact_k, exact_v = (x[at : at + tall, :, None, -last:].float() for x in recent)
            scores[..., unused - last : unused] = plain[at : at + tall] @ exact_k.transpose(-1, -2)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        weights = _softmax(scores.masked_fill_(hidden, float("-inf")), sink)
        if exact_part is not None:
            exact = weights[..., unused - last : unused]
            exact_part[at : at + tall] = (exact @ exact_v).flatten(1, 2)
            exact.zero_()
        out[at : at + tall] = _values(scratch, weights, kv.v, some, unused).flatten(1, 2)
    if kv.formats.v.rotated:
        out = unrotated(out)
    if exact_part is not None:
        out += exact_part
    return out.to(q.dtype).transpose(1, 2)


def _scores(scratch: DenseScratch, q: Tensor, rows: PagedRows, blocks: Tensor) -> Tensor:
    """[batch, kv_heads, group, count, keys]; `q` is scaled already."""
    low, high, scales, minima = _halves(scratch, rows, blocks)  # minima [halves, batch * heads, 1, keys]
    batch, heads, group, count, dim = q.shape
    parts = q.reshape(batch * heads, group * count, dim).split(dim // 2, dim=2)
    by_half = [torch.bmm(part, codes.transpose(1, 2)) for part, codes in zip(parts, (low, high), strict=True)]
    sums = [part.sum(dim=2, keepdim=True) for part in parts]
    if len(scales) == 1:
        by_half, sums = [by_half[0].add_(by_half[1])], [sums[0] + sums[1]]
    total = by_half[0].mul_(scales[0]).addcmul_(sums[0], minima[0])
    for part, s, scale, minimum in zip(by_half[1:], sums[1:], scales[1:], minima[1:], strict=True):
        total.add_(part.mul_(scale).addcmul_(s, minimum))
    return total.view(batch, heads, group, count, -1)


def _values(scratch: DenseScratch, weights: Tensor, rows: PagedRows, blocks: Tensor, unused: int) -> Tensor:
    """[batch, kv_heads, group, count, dim] of the softmax's weights [..., keys]."""
    low, high, scales, minima = _halves(scratch, rows, blocks)
    for x in (*scales, *minima):
        x[..., unused:] = 0
    batch, heads, group, count, keys = weights.shape
    p = weights.reshape(batch * heads, group * count, keys)
    last = len(scales) - 1
    halves = [
        torch.bmm(p * scales[i], codes).add_((p * minima[i]).sum(dim=2, keepdim=True))
        for i, codes in ((0, low), (last, high))
    ]
    return torch.cat(halves, dim=2).view(batch, heads, group, count, -1)


def _halves(
    scratch: DenseScratch, rows: PagedRows, blocks: Tensor
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Codes of the low and high nibbles, fp32 [batch * kv_heads, keys, dim / 2]; scales and minima
    per group, fp32 [batch * kv_heads, 1, keys].
    """
    codes = _by_head(rows.codes, blocks)
    assert rows.scales is not None, "int4 stores scales"
    pairs = _by_head(rows.scales, blocks).float()  # [batch * kv_heads, keys, 2 * groups]
    low, high = scratch.halves(codes.shape)
    low.copy_(codes & 15)
    high.copy_(codes >> 4)
    columns = [x[:, None] for x in pairs.transpose(1, 2).contiguous().unbind(1)]
    return low, high, columns[0::2], columns[1::2]


def _by_head(paged: Tensor, blocks: Tensor) -> Tensor:
    """[num_blocks, kv_heads, block_size, row] -> [batch * kv_heads, keys, row]."""
    picked = paged.index_select(0, blocks.flatten()).view(*blocks.shape, *paged.shape[1:])
    return picked.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]


def _hidden(keys: int, start: int, length: int, count: int, window: int | None) -> Tensor:
    """bool [count, keys]: True where a query must not see the key at `start` + its index."""
    position = torch.arange(length - count, length)[:, None]
    key = torch.arange(start, start + keys)
    hidden = key > position
    return hidden if window is None else hidden | (key <= position - window)
