"""`kvq bench attention --latent-dim`: latent attention over quantized latents, beside torch's."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kvq.bench.kernels.measure import Contender, copies_for, exact_attention
from kvq.bench.kernels.workload import Workload, blocks_of, filled, layout_of, queries
from kvq.cache.pool import PoolBytes
from kvq.errors import ConfigError
from kvq.kernels import AttentionOptions, Device, KernelSpec, select
from kvq.kernels.gather_dense.reference import gather_dense

_ALLOWED = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative errors


def latent_contenders(workload: Workload, formats: Sequence[str], dense: bool) -> Iterator[Contender]:
    """Yield kvq for every format of latents, and torch's attention. Rotary parts have the dtype of queries.

    Raises:
        ConfigError: more KV heads than one.
    """
    check_one_head(workload)
    for i, kv in enumerate(formats):
        own, stored = over_latents(workload, kv)
        yield own
        if dense and workload.is_even and i == 0:
            yield _over_dense(workload, own, stored)


def check_one_head(workload: Workload) -> None:
    """Raise ConfigError for more KV heads than one."""
    if workload.kv_heads != 1:
        raise ConfigError(f"latents are one KV head for all query heads, got --kv-heads {workload.kv_heads}")


def over_latents(workload: Workload, kv: str) -> tuple[Contender, tuple[Tensor, Tensor]]:
    """Return kvq's contender, and the stored keys and values, fp32 [sequences, 1, tokens, dim]."""
    name = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[workload.dtype]
    layout, blocks = layout_of(workload, f"{name}/{kv}"), sum(blocks_of(workload))
    pool = PoolBytes(layout.groups[0], blocks, workload.device)
    layers = [pool.layer(i, layout.recipe) for i in range(len(layout.geometry.layers))]
    spec = KernelSpec(
        formats=layers[0].formats, q_heads=workload.q_heads, kv_heads=1, block_size=workload.block_size
    )
    kernel = partial(select, spec=spec, device=Device.of(workload.device), backend=workload.backend)
    write, attend = kernel("write_kv"), kernel("attend_latent")
    layout.recipe.check_unstaged("a benchmark of latent attention")
    batch = filled(workload, range(len(layers)), lambda i, k, v, slots: write.run(k, v, layers[i], slots))
    q, options = queries(workload), AttentionOptions(scale=workload.query_dim**-0.5)
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
    """Return torch's attention over the same keys and values, contiguous, with all query heads as rows."""
    nbytes = stored[0].numel() * workload.dtype.itemsize
    copies = copies_for(workload.device, nbytes)
    keys = [stored[0].to(workload.dtype, copy=True) for _ in range(copies)]
    q = queries(workload)
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
