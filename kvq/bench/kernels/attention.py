"""`kvq bench attention`: one layer's attention over quantized blocks, compared with torch's attention."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from kvq.bench.kernels.latent import against_heads, latent_contenders
from kvq.bench.kernels.measure import Contender, Rows, compete, copies_for, exact_attention, relative_error
from kvq.bench.kernels.staged import filled_staged, read_bytes, steps_of_staged, visible_kv
from kvq.bench.kernels.workload import Workload, filled_cache
from kvq.cache import KVCache
from kvq.errors import ConfigError
from kvq.evals.watch import UNWATCHED, Progress
from kvq.kernels import AttentionOptions, Device, KernelSpec, SequenceBatch, StagedBatch
from kvq.kernels.attend.reference import limit_of, rounded_queries
from kvq.kernels.gpu import support as gpu

_SLACK = 1e-5  # relative error that is always acceptable


def bench_attention(
    workload: Workload,
    formats: Sequence[str],
    *,
    rivals: Path | None = None,
    dense_rivals: bool = True,
    repeats: int = 20,
    progress: Progress = UNWATCHED.progress,
) -> tuple[Rows, float]:
    """Check every contender against fp64, then time them interleaved.

    `rivals`: a folder with a rivals.py; see `_third_parties`. Returns the rows and the memory read bandwidth
    in GB/s, measured in the same run.

    Raises:
        KVQError: a contender's error is too large; nothing was timed.
    """
    with torch.inference_mode():
        if workload.expanded is not None:
            found = list(against_heads(workload, formats, workload.expanded))
        else:
            contenders = _contenders if workload.latent_dim is None else latent_contenders
            found = list(contenders(workload, formats, dense_rivals))
        if rivals is not None:
            found += _third_parties(workload, rivals)
        rows, bandwidth = compete(found, repeats, progress)
    shape = {
        "operation": "decode" if workload.new == 1 else "extend",
        "batch": len(workload.contexts),
        "context": max(workload.contexts),
        "tokens": workload.tokens,
        "new_tokens": workload.new,
        "q_heads": workload.q_heads,
        "kv_heads": workload.kv_heads,
        "head_dim": workload.head_dim,
        "block_size": workload.block_size,
        **({} if workload.latent_dim is None else {"latent_dim": workload.latent_dim}),
        **({} if workload.expanded is None else {"expanded": workload.expanded}),
    }
    return [row | shape | {"fraction_of_bandwidth": row["gb_per_s"] / bandwidth} for row in rows], bandwidth


def _contenders(workload: Workload, formats: Sequence[str], dense_rivals: bool) -> Iterator[Contender]:
    dense_rivals = dense_rivals and workload.is_even
    for kv in formats:
        if workload.layout(kv).recipe.is_staged:
            for name, step in steps_of_staged(workload, kv).items():
                yield replace(over_blocks(step, kv)[0], name=name)
            continue
        own, cache, batch = over_blocks(workload, kv)
        yield own
        assert isinstance(batch, SequenceBatch), "staged formats were handled above"
        if own.backend == "triton" and workload.new > 1:
            yield fused(workload, own, cache, batch)
        if own.backend == "triton" and _multiplies_8_bits(workload, cache):
            yield in_8_bits(workload, own, cache, batch)
        if dense_rivals and kv == "int4":
            yield _dequantized(workload, own, cache, batch)
    if dense_rivals:
        dtypes = {workload.dtype} if workload.device.type == "cuda" else {torch.float32, torch.bfloat16}
        for dtype in sorted(dtypes, key=str):
            yield from _over_dense(workload, dtype)


def over_blocks(workload: Workload, kv: str) -> tuple[Contender, KVCache, SequenceBatch | StagedBatch]:
    """Return kvq's contender, its cache, and the batch that attends over the cache."""
    is_staged = workload.layout(kv).recipe.is_staged
    cache, batch, copies = (filled_staged if is_staged else filled_cache)(workload, kv)
    q = workload.queries()
    scale = workload.head_dim**-0.5
    if isinstance(batch, StagedBatch):
        k, v = visible_kv(cache, batch)
        nbytes = sum(read_bytes(cache.layout, context) for context in workload.contexts)
    else:
        nbytes = cache.layout.kv_bytes_per_token * workload.tokens
        k, v = cache.gather(0, batch.tables[-1:], 0, workload.contexts[-1], unrotate=True)
    truth = exact_attention(q[-1], k[0], v[0], scale)
    ran = cache.backend_of("attend", 0)
    rounding = torch.bfloat16 if ran == "cpu" else workload.dtype  # SDPA in this dtype determines `allowed`
    mine, keys, values = (x.to(rounding) for x in (q[-1:].transpose(1, 2), k, v))
    same = _sdpa(mine, keys, values, scale, folded=True)[0]
    options = AttentionOptions(scale=scale)
    allowed = max(2 * relative_error(same.transpose(0, 1), truth), _SLACK)
    if ran == "triton-8bit" and isinstance(batch, SequenceBatch):
        allowed += _of_rounding(workload, cache, batch, truth)
    own = Contender(
        name="kvq",
        backend=ran,
        over={"kv": kv},
        run=lambda copy: cache.attend(copy, q.flatten(0, 1), batch, options)[0],
        nbytes=round(nbytes / copies),
        copies=copies,
        truth=truth,
        allowed=allowed,
    )
    return own, cache, batch


def fused(workload: Workload, own: Contender, cache: KVCache, batch: SequenceBatch) -> Contender:
    """Return the contender that attends in one Triton kernel: a batch marked as captured gathers no rows."""
    q, options = workload.queries().flatten(0, 1), AttentionOptions(scale=workload.head_dim**-0.5)
    captured = replace(batch, is_captured=True)
    return replace(own, name="kvq, fused", run=lambda copy: cache.attend(copy, q, captured, options)[0])


def in_8_bits(workload: Workload, own: Contender, cache: KVCache, batch: SequenceBatch) -> Contender:
    """Return the contender whose Triton kernel rounds queries to 8 bits, over the same blocks."""
    q, options = workload.queries().flatten(0, 1), AttentionOptions(scale=workload.head_dim**-0.5)
    attend = gpu.lazy("attend.triton.attend", "attend")
    return replace(
        own,
        name="kvq, 8-bit products",
        run=lambda copy: attend(q, cache.layer(copy), batch, options, rounded=True)[0],
        allowed=own.allowed + _of_rounding(workload, cache, batch, own.truth),
    )


def _of_rounding(workload: Workload, cache: KVCache, batch: SequenceBatch, truth: Tensor) -> float:
    """Return twice the relative error caused by only rounding queries to 8 bits, for the last sequence."""
    k, v = cache.gather(0, batch.tables[-1:], 0, workload.contexts[-1], unrotate=True)
    held = rounded_queries(workload.queries()[-1], cache.layer(0).formats.k)
    return 2 * relative_error(exact_attention(held, k[0], v[0], workload.head_dim**-0.5), truth)


def _multiplies_8_bits(workload: Workload, cache: KVCache) -> bool:
    formats = cache.layer(0).formats
    spec = KernelSpec(
        formats=formats, q_heads=workload.q_heads, kv_heads=workload.kv_heads, block_size=workload.block_size
    )
    return limit_of(formats.k) is not None and gpu.supports_8bit(spec, Device.of(workload.device)).yes


def _dequantized(workload: Workload, own: Contender, cache: KVCache, batch: SequenceBatch) -> Contender:
    """Return the contender that first dequantizes all K and V, then runs torch's attention."""
    q, scale = workload.queries(), workload.head_dim**-0.5

    def run(copy: int) -> Tensor:
        dense = cache.gather(copy, batch.tables, 0, workload.contexts[0], unrotate=True)
        out = _sdpa(q.transpose(1, 2).float(), *dense, scale, folded=True)
        return out.transpose(1, 2).flatten(0, 1).to(q.dtype)

    return replace(own, name="dequantize, then SDPA", backend="torch", run=run)


def _over_dense(workload: Workload, dtype: torch.dtype) -> Iterator[Contender]:
    """Yield torch's attention over contiguous K and V, in two forms of grouped-query attention."""
    k, v = (x.to(dtype) for x in workload.dense_kv())
    scale, q = workload.head_dim**-0.5, workload.queries().to(dtype)
    copies = copies_for(workload.device, 2 * k.nbytes)
    ks, vs = ([x.clone() for _ in range(copies)] for x in (k, v))
    truth = exact_attention(q[-1], k[-1], v[-1], scale)
    step = {torch.float32: _SLACK, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    is_flash = workload.device.type == "cuda" and workload.new > 1  # flash attention supports no folded mask
    for form in ("enable_gqa",) if is_flash else ("folded", "enable_gqa"):

        def attend(copy: int, folded: bool = form == "folded") -> Tensor:
            out = _sdpa(q.transpose(1, 2), ks[copy], vs[copy], scale, folded=folded)
            return out.transpose(1, 2).flatten(0, 1)

        yield Contender(
            name=f"SDPA, {form}",
            backend="torch",
            over={"kv": str(dtype).removeprefix("torch.")},
            run=attend,
            nbytes=2 * k.nbytes,
            copies=copies,
            truth=truth,
            allowed=step,
        )


def _third_parties(workload: Workload, folder: Path) -> Iterator[Contender]:
    """Yield the contenders from a user's rivals.py, which defines `contenders(workload, q, k, v)`.

    This function must yield (name, kv, bytes read, run). `q` is [sequences, new, q_heads, head_dim], `k` and
    `v` are [sequences, kv_heads, tokens, head_dim], and `run()` returns a tensor with the shape of `q`.
    """
    if not workload.is_even:
        raise ConfigError(
            "--rivals get dense K and V, so all sequences must be of one length; give --context N"
        )
    path = folder / "rivals.py"
    spec = importlib.util.spec_from_file_location("rivals", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError(f"--rivals takes a folder with a rivals.py, found none in {folder}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    k, v = (x.to(workload.dtype) for x in workload.dense_kv())
    q = workload.queries()
    truth = exact_attention(q[-1], k[-1], v[-1], workload.head_dim**-0.5)
    for name, kv, nbytes, run in module.contenders(workload, q, k, v):

        def flat(_: int, run: Callable[[], Tensor] = run) -> Tensor:
            return run().flatten(0, 1)

        yield Contender(
            name=name,
            backend="third party",
            over={"kv": kv},
            run=flat,
            nbytes=nbytes,
            copies=1,
            truth=truth,
            allowed=0.5,  # their quantization may lose accuracy; only garbage is refused
        )


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, *, folded: bool) -> Tensor:
    """Compute causal attention for the last positions; `q` and the result are [batch, q_heads, new, dim]."""
    batch, q_heads, new, dim = q.shape
    heads, keys = k.shape[1:3]
    mask: Any = None
    if new > 1 and q.device.type == "cuda" and not folded:
        mask = causal_lower_right(new, keys)  # with it, flash attention needs no mask tensor
    elif new > 1:
        mask = torch.ones(new, keys, dtype=torch.bool, device=q.device).tril_(keys - new)
    if not folded:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=q_heads != heads
        )
    group = q_heads // heads
    q = q.reshape(batch, heads, group * new, dim)
    mask = None if mask is None else mask.repeat(group, 1)
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.reshape(batch, q_heads, new, dim)
