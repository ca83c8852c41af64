"""Operators over blocks, with `PagedKV` and `SequenceBatch` split into tensors, numbers and names.

`k_codes`, `k_scales`, `k_static` and their V counterparts are the tensors of `PagedRows`; `kv` is the name of
a format or pair, as for `--kv`; head dimensions and block size are derived from the codes. Results are
documented in `kvq/kernels/*/reference.py`. torch's schemas have no structures, so each tensor is an argument.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from kvq.formats import CODES, KVRecipe, LayerFormats, split_pair
from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.paged import PagedKV, PagedRows, SequenceBatch
from kvq.kernels.registry import select
from kvq.kernels.spec import Device, KernelSpec


@custom_op("kvq::write_kv", mutates_args=("k_codes", "k_scales", "v_codes", "v_scales"))
def write_kv(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_codes: Tensor,
    k_scales: Tensor | None,
    v_codes: Tensor,
    v_scales: Tensor | None,
    kv: str,
    k_static: Tensor | None = None,
    v_static: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Quantize rows [tokens, kv_heads, dim] into their slots; return bool [tokens], True if not finite."""
    paged = _paged(_rows(k_codes, k_scales, k_static), _rows(v_codes, v_scales, v_static), kv)
    bad: Tensor = _kernel("write_kv", paged, k.shape[1], backend)(k, v, paged, slots)
    return bad


@write_kv.register_fake
def _(k: Tensor, *_: Any) -> Tensor:
    return k.new_empty(k.shape[0], dtype=torch.bool)


@custom_op("kvq::attend", mutates_args=())
def attend(
    q: Tensor,
    k_codes: Tensor,
    k_scales: Tensor | None,
    v_codes: Tensor,
    v_scales: Tensor | None,
    tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    kv: str,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_static: Tensor | None = None,
    v_static: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend from q [tokens, q_heads, dim] over blocks; return out in q's dtype, and lse [tokens, q_heads].

    `tables`: int32 [sequences, blocks]. `query_lens`, `context_lens`: as in SequenceBatch.
    """
    paged = _paged(_rows(k_codes, k_scales, k_static), _rows(v_codes, v_scales, v_static), kv)
    options = AttentionOptions(scale=scale, window=window, softcap=softcap, sinks=sinks)
    batch = _read_batch(tables, query_lens, context_lens)
    out, lse = _kernel("attend", paged, q.shape[1], backend)(q, paged, batch, options)
    return out, lse


def _attended(q: Tensor, k_codes: Tensor, k_scales: Tensor | None, v_codes: Tensor, *rest: Any) -> Any:
    kv = rest[4]
    out = q.new_empty(*q.shape[:2], _head_dims(k_codes, v_codes, kv)[1])
    return out, q.new_empty(*q.shape[:2], dtype=torch.float32)


attend.register_fake(_attended)


@custom_op("kvq::attend_latent", mutates_args=())
def attend_latent(
    q: Tensor,
    k_codes: Tensor,
    k_scales: Tensor | None,
    v_codes: Tensor,
    v_scales: Tensor | None,
    tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    kv: str,
    scale: float,
    k_static: Tensor | None = None,
    v_static: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend from absorbed q [tokens, q_heads, v dim + k dim] over blocks of one head, which store latents as
    V and the rotary parts of keys as K; return latents [tokens, q_heads, v dim] and lse.
    """
    paged = _paged(_rows(k_codes, k_scales, k_static), _rows(v_codes, v_scales, v_static), kv)
    batch = _read_batch(tables, query_lens, context_lens)
    run = _kernel("attend_latent", paged, q.shape[1], backend)
    out, lse = run(q, paged, batch, AttentionOptions(scale=scale))
    return out, lse


attend_latent.register_fake(_attended)


@custom_op("kvq::gather_dense", mutates_args=())
def gather_dense(
    k_codes: Tensor,
    k_scales: Tensor | None,
    v_codes: Tensor,
    v_scales: Tensor | None,
    tables: Tensor,
    start: int,
    end: int,
    kv: str,
    unrotate: bool = False,
    k_static: Tensor | None = None,
    v_static: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return K and V for positions [start, end) of `tables`, fp32 [sequences, kv_heads, end - start, dim]."""
    paged = _paged(_rows(k_codes, k_scales, k_static), _rows(v_codes, v_scales, v_static), kv)
    run = _kernel("gather_dense", paged, k_codes.shape[1], backend)
    k, v = run(paged, tables, start, end, unrotate=unrotate)
    return k, v


@gather_dense.register_fake
def _(k_codes: Tensor, k_scales: Tensor | None, v_codes: Tensor, *rest: Any) -> Any:
    _, tables, start, end, kv, *_ = rest
    shape = tables.shape[0], k_codes.shape[1], end - start
    dims = _head_dims(k_codes, v_codes, kv)
    return tuple(k_codes.new_empty(*shape, dim, dtype=torch.float32) for dim in dims)


@custom_op("kvq::merge_partials", mutates_args=())
def merge_partials(
    outs: Tensor, lses: Tensor, sinks: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Merge attention over parts of a context, [parts, tokens, heads, dim]; return out and lse, both fp32."""
    spec = _spec("fp32", (outs.shape[3], outs.shape[3]), (outs.shape[2], outs.shape[2]), 16)
    out, lse = select("merge_partials", spec, _device(outs.device), backend).run(outs, lses, sinks)
    return out, lse


@merge_partials.register_fake
def _(outs: Tensor, *_: Any) -> Any:
    return outs.new_empty(outs.shape[1:], dtype=torch.float32), outs.new_empty(
        outs.shape[1:3], dtype=torch.float32
    )


def _rows(codes: Tensor, scales: Tensor | None, static_scale: Tensor | None) -> PagedRows:
    return PagedRows(codes=codes, scales=scales, static_scale=static_scale)


def _paged(k: PagedRows, v: PagedRows, kv: str) -> PagedKV:
    formats = _formats(kv, _head_dims(k.codes, v.codes, kv))
    return PagedKV(k=k, v=v, formats=formats, block_size=k.codes.shape[2])


def _read_batch(tables: Tensor, query_lens: Sequence[int], context_lens: Sequence[int]) -> SequenceBatch:
    """Return a batch whose sequences are only read."""
    return SequenceBatch(
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
        tables=tables,
        slots=tables.new_empty(0, dtype=torch.int64),
    )


def _kernel(operation: str, paged: PagedKV, q_heads: int, backend: str) -> Callable[..., Any]:
    dims = paged.formats.k_head_dim, paged.formats.v_head_dim
    codes = paged.k.codes
    name = f"{paged.formats.k.name}/{paged.formats.v.name}"
    spec = _spec(name, dims, (q_heads, codes.shape[1]), codes.shape[2])
    return select(operation, spec, _device(codes.device), backend).run


def _head_dims(k_codes: Tensor, v_codes: Tensor, kv: str) -> tuple[int, int]:
    """Return the head dimensions of K and V, computed from the widths of the codes."""
    pair = split_pair(kv)
    k_bits, v_bits = (_bits(name) for name in (pair.k, pair.v))
    return k_codes.shape[3] * 8 // k_bits, v_codes.shape[3] * 8 // v_bits


def _bits(name: str) -> int:
    """Return the bits per element within a byte of codes, or 8 if each element is a separate tensor item."""
    code = CODES[name.partition("_")[0]]
    return code.bits if code.is_grouped else 8


@lru_cache(maxsize=64)
def _formats(kv: str, dims: tuple[int, int]) -> LayerFormats:
    recipe = KVRecipe.uniform(kv, [dims])
    recipe.check_unstaged("an operator over blocks")
    return recipe.layers[0]


@lru_cache(maxsize=64)
def _spec(kv: str, dims: tuple[int, int], heads: tuple[int, int], block_size: int) -> KernelSpec:
    q_heads, kv_heads = heads
    return KernelSpec(formats=_formats(kv, dims), q_heads=q_heads, kv_heads=kv_heads, block_size=block_size)


@lru_cache(maxsize=16)
def _device(device: torch.device) -> Device:
    return Device.of(device)
