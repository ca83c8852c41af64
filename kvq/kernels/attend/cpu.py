"""`attend` in C++ for CPUs."""

from typing import Any

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.attend.options import AttentionOptions, Part
from kvq.kernels.native.abi import NUMBERS, batch_of, check_shape, dense_of, layer_of, struct
from kvq.kernels.native.library import run
from kvq.kernels.paged import PagedKV, SequenceBatch

_MOST = 2**31 - 2**13  # tokens; positions in blocks of up to 4,096 must not pass 2^31


def attend(
    q: Tensor, kv: PagedKV, batch: SequenceBatch, options: AttentionOptions, *, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """Do what the reference does; see reference.py.

    INT8 and grouped codes are multiplied with queries and probabilities rounded to integers of 15 bits plus
    sign, with a relative error near 1e-4; with `exact`, or on CPUs without AVX2, products are computed in
    fp32.

    Raises:
        IndexError: a table names a block outside the pool.
        MemoryError: there is not enough memory for scratch buffers.
        ConfigError: shapes don't fit the blocks or the batch.
    """
    check_shape("q", q, q.shape[1], kv.formats.k_head_dim)
    return run_attention("attend", q, kv, batch, options, exact=exact)


def run_attention(
    kernel: str, q: Tensor, kv: PagedKV, batch: SequenceBatch, options: AttentionOptions, *, exact: bool
) -> tuple[Tensor, Tensor]:
    """Run one of the C++ attention kernels over blocks, with queries of a checked shape; see `attend`."""
    tokens, q_heads, _ = q.shape
    check_batch(batch, tokens, kv.block_size, options)
    asked, _kept_sinks = options_of(options, q_heads, kv.k.codes.shape[1], exact=exact)
    queries, kept_q = dense_of(q)
    out = torch.empty(tokens, q_heads, kv.formats.v_head_dim, dtype=kept_q.dtype)
    lse = torch.empty(tokens, q_heads, dtype=torch.float32)
    results, _ = dense_of(out)
    sequences, _kept_tables = batch_of(batch)
    run(kernel, layer_of(kv), queries, results, lse.data_ptr(), sequences, asked)
    return out.to(q.dtype), lse


def check_batch(batch: SequenceBatch, tokens: int, block_size: int, options: AttentionOptions) -> None:
    """Raise unless the batch has `tokens` new tokens and its tables cover all keys that the tokens see.

    Raises:
        ConfigError: the lengths don't match.
        IndexError: a table is shorter than its sequence.
    """
    new, contexts = batch.query_lens, batch.context_lens
    rows, width = batch.tables.shape
    if tokens != sum(new) or len(contexts) != len(new) or rows < len(new):
        raise ConfigError(
            f"q holds {tokens} tokens, query_lens are {new}, context_lens {contexts}, tables have "
            f"{rows} rows; they don't belong together"
        )
    if any(not 0 <= count <= context for count, context in zip(new, contexts, strict=True)):
        raise ConfigError(f"every query_len must be 0 to its context_len, got {new} and {contexts}")
    reach = width * block_size
    ends = (options.end(context - 1) for context in contexts)
    if any(end > reach for end in ends) or max(contexts, default=0) > _MOST:
        raise IndexError("a table or a slot names a block outside the pool: it is shorter than its sequence")


def options_of(
    options: AttentionOptions, q_heads: int, kv_heads: int, *, exact: bool
) -> tuple[Any, Tensor | None]:
    """Return a KvqAttention structure and the tensor that it points to.

    Raises:
        ConfigError: the query heads don't fit the KV heads or the sinks.
    """
    sinks = options.sinks
    if q_heads % kv_heads or (sinks is not None and sinks.shape != (q_heads,)):
        raise ConfigError(f"{q_heads} query heads don't fit {kv_heads} KV heads, or the sinks")
    if sinks is not None:
        sinks = sinks.float().contiguous()
    asked = struct("KvqAttention")(
        scale=options.scale,
        softcap=options.softcap or 0.0,
        window=min(options.window or 0, _MOST),
        chunk=min(options.chunk or 0, _MOST),
        q_heads=q_heads,
        sinks=None if sinks is None else sinks.data_ptr(),
        threads=torch.get_num_threads(),
        exact=exact,
        **_part(options.part),
    )
    return asked, sinks


def _part(part: Part | None) -> dict[str, int]:
    """Return the KvqAttention fields that select a part of the keys."""
    if part is None:
        return {"part": NUMBERS["KVQ_ALL"]}
    return {
        "part": NUMBERS["KVQ_YOUNG" if part.is_young else "KVQ_OLD"],
        "recent": min(part.recent, _MOST),
        "edge_size": part.block_size,
        "first": min(part.first, _MOST),
        "last": _MOST if part.last is None else min(part.last, _MOST),
    }
