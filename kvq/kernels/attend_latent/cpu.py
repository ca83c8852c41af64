"""`attend_latent` in C++ for CPUs."""

import ctypes
from functools import lru_cache

from torch import Tensor

from kvq.errors import ConfigError
from kvq.formats import Code
from kvq.kernels.attend.cpu import run_attention
from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.native.abi import check_shape
from kvq.kernels.native.library import run
from kvq.kernels.paged import PagedKV, SequenceBatch

# Speed of products relative to torch's in fp32, in prefills of 64 to 2,048 tokens: 2.1 to 4.9 in tiles and
# 1.1 to 1.5 in fp32, on one core of a Xeon with AMX, for 16 heads.
_IN_TILES, _IN_FP32 = 3.5, 1.3


def attend_latent(
    q: Tensor, kv: PagedKV, batch: SequenceBatch, options: AttentionOptions, *, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """Do what the reference does; see reference.py.

    On CPUs with AMX, products represent fp32 numbers as sums of bf16 numbers, except for FP32 blocks; the
    relative error is near 1e-5. With `exact`, or on other CPUs, all products are computed in fp32.

    Raises:
        IndexError: a table names a block outside the pool.
        MemoryError: there is not enough memory for scratch buffers.
        ConfigError: shapes don't fit the blocks or the batch, or the latents have more than one head.
    """
    if (heads := kv.k.codes.shape[1]) != 1:
        raise ConfigError(f"latents are of one KV head for all query heads, got {heads}")
    check_shape("q", q, q.shape[1], kv.formats.v_head_dim + kv.formats.k_head_dim)
    return run_attention("attend_latent", q, kv, batch, options, exact=exact)


@lru_cache(maxsize=1)
def has_tiles() -> bool:
    """Return True if this CPU has matrix instructions for tiles of bf16."""
    found = ctypes.c_int(0)
    run("latent_tiles", ctypes.addressof(found))
    return bool(found.value)


def relative_speed(kv: PagedKV, *, exact: bool) -> float:
    """Return the speed of the kernel's matrix products on blocks in this format, relative to torch's."""
    codes = (kv.formats.k.code, kv.formats.v.code)
    return _IN_TILES if has_tiles() and not exact and Code.FP32 not in codes else _IN_FP32
