"""Attention over two segments: older tokens in quantized blocks, recent ones as they came."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvq.cache.kv_cache import KVCache
from kvq.formats import LayerFormats, parse_format
from kvq.kernels import Device, KernelSpec, PagedKV, PagedRows, SequenceBatch, select

_LEAST_BLOCK = 256  # tokens
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def can_attend_both(batch: SequenceBatch, recent: int) -> bool:
    """True if every sequence got as many tokens and has at least `recent` of them."""
    return len(set(batch.query_lens)) == 1 and min(batch.context_lens) >= recent


def attend_both(
    cache: KVCache,
    layer: int,
    q: Tensor,
    batch: SequenceBatch,
    recent: tuple[Tensor, Tensor],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """What `KVCache.attend` does, but with `recent` in place of the last tokens in the blocks.

    `recent`: K and V of every sequence's last tokens, the step's own among them,
    [sequences, kv_heads, some, dim]. Both parts are merged by their log-sum-exp, exactly. Returns
    [tokens, q_heads, v_head_dim] in q's dtype.
    """
    some = recent[0].shape[2]
    kv = _as_blocks(recent)
    attend, merge = _kernels(kv.formats, q.shape[1], recent[0].shape[1], q.device)
    own = SequenceBatch(
        query_lens=batch.query_lens,
        context_lens=(some,) * len(batch.query_lens),
        tables=torch.arange(len(batch.query_lens), dtype=torch.int32, device=q.device)[:, None],
        slots=batch.slots,
    )
    query = q.float()
    parts = [attend(query, kv, own, scale=scale, window=window, softcap=softcap)]
    if max(batch.context_lens) > some:
        parts.append(
            cache.attend(
                layer,
                query,
                batch,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=None,
                skip_last=some,
            )
        )
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out: Tensor = merge(outs, lses, sinks)[0]
    return out.to(q.dtype)


@lru_cache(maxsize=64)
def _kernels(
    formats: LayerFormats, q_heads: int, kv_heads: int, device: torch.device
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`attend` for unquantized rows, in blocks of any size, and `merge_partials`."""
    spec = KernelSpec(formats=formats, q_heads=q_heads, kv_heads=kv_heads, block_size=1)
    where = Device.of(device)
    return select("attend", spec, where).run, select("merge_partials", spec, where).run


@lru_cache(maxsize=64)
def _formats(k: torch.dtype, v: torch.dtype, k_head_dim: int, v_head_dim: int) -> LayerFormats:
    return LayerFormats(
        k=parse_format(_NAMES[k], k_head_dim),
        v=parse_format(_NAMES[v], v_head_dim),
        k_head_dim=k_head_dim,
        v_head_dim=v_head_dim,
    )


def _as_blocks(recent: tuple[Tensor, Tensor]) -> PagedKV:
    """Dense rows [sequences, kv_heads, some, dim] as one unquantized block per sequence.

    The block is said to be larger than it is: no key lies past the rows, and kernels that are
    compiled per block size see few sizes.
    """
    k, v = recent
    return PagedKV(
        k=PagedRows(codes=k, scales=None, static_scale=None),
        v=PagedRows(codes=v, scales=None, static_scale=None),
        formats=_formats(k.dtype, v.dtype, k.shape[3], v.shape[3]),
        block_size=max(_LEAST_BLOCK, 1 << (k.shape[2] - 1).bit_length()),
    )
