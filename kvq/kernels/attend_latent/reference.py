"""Reference `attend_latent`: attention of absorbed queries over blocks of latents and rotary keys."""

import torch
from torch import Tensor

from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.attend.reference import attend_rows
from kvq.kernels.codec import rotate
from kvq.kernels.gather_dense.reference import gather_dense
from kvq.kernels.paged import PagedKV, SequenceBatch


def attend_latent(
    q: Tensor, kv: PagedKV, batch: SequenceBatch, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attend causally from every sequence's new tokens over rows that are stored once for all heads.

    Blocks of one KV head store the rotary part of a token's key as K and its latent as V, each in its own
    format. A key is the latent followed by the rotary part; the value is the latent. `q`: [tokens, q_heads,
    v_head_dim + k_head_dim], with the projection from latents to keys absorbed into the queries.

    Returns out [tokens, q_heads, v_head_dim] in q's dtype (latents, before the projection to values), and lse
    fp32 [tokens, q_heads], as `attend` does.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1 and appendix C.
    """
    fmt = kv.formats
    latent, rotary = q.float().split((fmt.v_head_dim, fmt.k_head_dim), dim=-1)
    latent = rotate(latent) if fmt.v.rotated else latent
    rotary = rotate(rotary) if fmt.k.rotated else rotary

    def rows(table: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
        k, v = (x[0] for x in gather_dense(kv, table, start, end))
        return torch.cat((v, k), dim=-1), v

    query = torch.cat((latent, rotary), dim=-1)
    out, lse = attend_rows(query, rows, fmt.v_head_dim, batch, options)
    return (rotate(out) if fmt.v.rotated else out).to(q.dtype), lse
