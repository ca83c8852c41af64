"""`attend_latent` in C++ for CPUs."""

from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.attend.cpu import run_attention
from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.paged import PagedKV, SequenceBatch


def attend_latent(
    q: Tensor,
    kv: PagedKV,
    batch: SequenceBatch,
    options: AttentionOptions,
    *,
    skip_last: int = 0,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Do what the reference does; see there.

    On CPUs with AMX, products are of bf16 numbers whose sums stand for what bf16 can't hold, but for FP32
    blocks: a relative error near 1e-5. With `exact`, or on other CPUs, all is fp32.

    Raises:
        IndexError: a table names a block outside the pool.
        MemoryError: no room for scratch memory.
        ConfigError: shapes that don't fit the blocks or the batch, or latents of several heads.
    """
    if (heads := kv.k.codes.shape[1]) != 1:
        raise ConfigError(f"latents are of one KV head for all query heads, got {heads}")
    dim = kv.formats.v_head_dim + kv.formats.k_head_dim
    return run_attention("attend_latent", q, kv, batch, options, q_dim=dim, skip_last=skip_last, exact=exact)
