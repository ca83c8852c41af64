"""`kvq bench attention --latent-dim`: attention over quantized latents, compared with torch's attention.

`--expanded` compares latents with K and V of every head, for the same layer. Both contenders get per-head
queries and the new tokens' latents, as in the model's code. With latents, the projection is absorbed into
queries and results; with heads, the new latents are expanded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kvq.bench.kernels.measure import Contender, Run, copies_for, exact_attention
from kvq.bench.kernels.workload import Workload, filled, slots_of
from kvq.cache import KVCache
from kvq.cache.pool import PoolBytes
from kvq.cache.stores.expansion import LatentExpansion
from kvq.errors import ConfigError
from kvq.geometry import Expansion
from kvq.kernels import AttentionOptions, Device, KernelSpec, PlainWeight, SequenceBatch, select
from kvq.kernels.gather_dense.reference import gather_dense
from kvq.kernels.linear.cpu import CpuLinear
from kvq.layout import KVLayout, plan_layout
from kvq.models.parts.linear import has_own_products

_ALLOWED = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative errors
_ALLOWED_EXPANDED = _ALLOWED | {torch.float32: 5e-4}


def latent_contenders(workload: Workload, formats: Sequence[str], dense: bool) -> Iterator[Contender]:
    """Yield kvq with every latent format, and torch's attention. Rotary parts have the queries' dtype.

    Raises:
        ConfigError: there is more than one KV head.
    """
    check_one_head(workload)
    for i, kv in enumerate(formats):
        own, stored = over_latents(workload, kv)
        yield own
        if dense and workload.is_even and i == 0:
            yield _over_dense(workload, own, stored)


def check_one_head(workload: Workload) -> None:
    """Raise ConfigError if there is more than one KV head."""
    if workload.kv_heads != 1:
        raise ConfigError(f"latents are one KV head for all query heads, got --kv-heads {workload.kv_heads}")


def over_latents(workload: Workload, kv: str) -> tuple[Contender, tuple[Tensor, Tensor]]:
    """Return kvq's contender, and the stored keys and values, fp32 [sequences, 1, tokens, dim]."""
    name = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[workload.dtype]
    layout, blocks = workload.layout(f"{name}/{kv}"), sum(workload.blocks())
    pool = PoolBytes(layout.groups[0], blocks, workload.device)
    layers = [pool.layer(i, layout.recipe) for i in range(len(layout.geometry.layers))]
    spec = KernelSpec(
        formats=layers[0].formats, q_heads=workload.q_heads, kv_heads=1, block_size=workload.block_size
    )
    kernel = partial(select, spec=spec, device=Device.of(workload.device), backend=workload.backend)
    write, attend = kernel("write_kv"), kernel("attend_latent")
    layout.recipe.check_unstaged("a benchmark of latent attention")
    batch = filled(workload, range(len(layers)), lambda i, k, v, slots: write.run(k, v, layers[i], slots))
    q, options = workload.queries(), AttentionOptions(scale=workload.query_dim**-0.5)
    rotary, latent = gather_dense(layers[0], batch.tables, 0, max(workload.contexts), unrotate=True)
    keys = torch.cat((latent, rotary), dim=-1)
    last = slice(0, workload.contexts[-1])
    own = Contender(
        name="kvq, latent",
        backend=attend.backend,
        over={"kv": kv},
        run=lambda copy: attend.run(q.flatten(0, 1), layers[copy], batch, options)[0],
        nbytes=round(layout.kv_bytes_per_token / len(layers) * workload.tokens),
        copies=len(layers),
        truth=exact_attention(q[-1], keys[-1][:, last], latent[-1][:, last], options.scale),
        allowed=_ALLOWED[workload.dtype],
    )
    return own, (keys, latent)


def _over_dense(workload: Workload, own: Contender, stored: tuple[Tensor, Tensor]) -> Contender:
    """Return torch's attention over the same keys and values, made contiguous, with query heads as rows."""
    nbytes = stored[0].numel() * workload.dtype.itemsize
    copies = copies_for(workload.device, nbytes)
    keys = [stored[0].to(workload.dtype, copy=True) for _ in range(copies)]
    q = workload.queries()
    new, heads = q.shape[1:3]
    folded = q.transpose(1, 2).flatten(1, 2)[:, None]  # [sequences, 1, heads * new, dim]
    tokens = keys[0].shape[2]
    visible = torch.ones(new, tokens, dtype=torch.bool, device=q.device).tril_(tokens - new)
    mask = visible.repeat(heads, 1) if new > 1 else None

    def attend(copy: int) -> Tensor:
        k = keys[copy]
        v = k[..., : stored[1].shape[3]]
        out = functional.scaled_dot_product_attention(
            folded, k, v, attn_mask=mask, scale=workload.query_dim**-0.5
        )
        rows: Tensor = out[:, 0].unflatten(1, (heads, new)).transpose(1, 2).flatten(0, 1)
        return rows

    return Contender(
        name="SDPA, absorbed",
        backend="torch",
        over={"kv": str(workload.dtype).removeprefix("torch.")},
        run=attend,
        nbytes=nbytes,
        copies=copies,
        truth=own.truth,
        allowed=_ALLOWED[workload.dtype],
    )


_CHUNK = 1024  # tokens written at a time

_Linear = Callable[[Tensor], Tensor]


def _projection(workload: Workload, each: int) -> tuple[LatentExpansion, _Linear]:
    """Return a projection from latents to heads in two forms: absorbed into attention, and as a Linear layer.

    The weights are random and exactly representable in bf16, as in checkpoints.
    """
    _, latent = workload.dims
    random = torch.Generator().manual_seed(workload.seed)
    weight = torch.randn(workload.q_heads * 2 * each, latent, generator=random, dtype=torch.float32)
    weight = (weight * latent**-0.5).bfloat16().to(workload.device, workload.dtype)
    is_own = weight.device.type == "cpu" and has_own_products(workload.dtype, workload.backend)
    own = CpuLinear(PlainWeight.narrowest(weight)) if is_own else partial(functional.linear, weight=weight)
    dims = Expansion(k_dim=each, v_dim=each)
    return LatentExpansion(weight, workload.q_heads, dims, None, "", packed=is_own), own


def against_heads(workload: Workload, formats: Sequence[str], each: int) -> Iterator[Contender]:
    """Yield kvq's attention over latents and over heads, for every format.

    `each`: number of elements of a head's V, and of its K without the rotary part.

    Raises:
        ConfigError: there are no latents, or there is more than one KV head.
    """
    if workload.latent_dim is None:
        raise ConfigError("--expanded multiplies latents out, so it goes with --latent-dim")
    check_one_head(workload)
    expansion, linear = _projection(workload, each)
    for kv in formats:
        yield _over_latents(workload, kv, expansion)
        yield _over_heads(workload, kv, expansion, linear)


def _over_latents(workload: Workload, kv: str, expansion: LatentExpansion) -> Contender:
    layout = workload.layout(kv)
    geometry = layout.geometry
    layers = tuple(replace(layer, is_latent=True, expansion=expansion.dims) for layer in geometry.layers)
    latent = plan_layout(
        replace(geometry, layers=layers),
        layout.recipe,
        block_size=layout.block_size,
        order=layout.groups[0].order,
    )
    cache, batch = _filled(workload, latent)
    q, options = _head_queries(workload, expansion)
    rows = cache.gather(0, batch.tables[-1:], 0, workload.contexts[-1], unrotate=True)

    def attend(copy: int) -> Tensor:
        out, _ = cache.attend(copy, expansion.absorbed(q), batch, options)
        return expansion.values(out)

    k, v = expansion.expanded(*(x[0, 0].float() for x in rows))
    truth = exact_attention(q[-workload.new :], k, v, options.scale)  # for the last sequence
    return _contender("kvq, latents", workload, kv, cache, attend, truth)


def _over_heads(workload: Workload, kv: str, expansion: LatentExpansion, linear: _Linear) -> Contender:
    dims = expansion.dims
    heads = replace(
        workload, kv_heads=workload.q_heads, head_dim=dims.k_dim + workload.head_dim, latent_dim=dims.v_dim
    )
    cache, batch = _filled(workload, heads.layout(kv), expansion)
    q, options = _head_queries(workload, expansion)
    new = torch.randn(len(q), expansion.latent_dim, dtype=torch.float32).to(q)

    def attend(copy: int) -> Tensor:
        linear(new)
        return cache.attend(copy, q, batch, options)[0]

    k, v = cache.gather(0, batch.tables[-1:], 0, workload.contexts[-1], unrotate=True)
    truth = exact_attention(q[-workload.new :], k[0], v[0], options.scale)
    return _contender("kvq, heads", workload, kv, cache, attend, truth)


def _contender(
    name: str, workload: Workload, kv: str, cache: KVCache, attend: Run, truth: Tensor
) -> Contender:
    copies = len(cache.layout.geometry.layers)
    return Contender(
        name=name,
        backend=cache.backend_of("attend", 0),
        over={"kv": kv},
        run=attend,
        nbytes=round(cache.layout.kv_bytes_per_token / copies * workload.tokens),
        copies=copies,
        truth=truth,
        allowed=_ALLOWED_EXPANDED[workload.dtype],
    )


def _filled(
    workload: Workload, layout: KVLayout, heads: LatentExpansion | None = None
) -> tuple[KVCache, SequenceBatch]:
    """Return a cache of random latents and rotary keys, or of the heads they expand to, and its step."""
    layout.recipe.check_unstaged("a benchmark of latent attention")
    tables, blocks = workload.shuffled_tables(), sum(workload.blocks())
    cache = KVCache(layout, num_blocks=[blocks], device=workload.device, backend=workload.backend)
    for i, position, k, v in workload.random_rows(_CHUNK):
        if heads is not None:
            rows = heads.expanded(k[:, 0].float(), v[:, 0].float())
            k, v = (x.transpose(0, 1).to(workload.dtype) for x in rows)  # [tokens, heads, dim]
        for layer in range(len(layout.geometry.layers)):
            cache.write(layer, k, v, slots_of(tables[i], position, workload.block_size))
    return cache, workload.step(tables)


def _head_queries(workload: Workload, expansion: LatentExpansion) -> tuple[Tensor, AttentionOptions]:
    """Return per-head queries, [tokens, q_heads, k_dim + rotary], and options with their scale."""
    dim = expansion.dims.k_dim + workload.head_dim
    random = torch.Generator().manual_seed(workload.seed + 1)
    q = torch.randn(
        len(workload.contexts) * workload.new, workload.q_heads, dim, generator=random, dtype=torch.float32
    )
    return q.to(workload.device, workload.dtype), AttentionOptions(scale=dim**-0.5)
