"""Writing a few int4 rows on a CPU: K and V at once, in a third of the reference's operations."""

import torch
from torch import Tensor

from kvq.cache.int4 import encode_int4
from kvq.formats import Code, Grouped
from kvq.kernels import PagedKV

MOST_ROWS = 64  # tokens; beyond, the reference's butterflies are cheaper than matrix products


def can_write_few(kv: PagedKV) -> bool:
    """True for layers whose K and V have one format, rotated int4, one dimension and are on a CPU."""
    fmt = kv.formats
    return (
        kv.k.codes.device.type == "cpu"
        and fmt.k == fmt.v
        and fmt.k.code is Code.INT4
        and fmt.k.rotated
        and fmt.k_head_dim == fmt.v_head_dim
        and torch.get_float32_matmul_precision() == "highest"
    )


def write_few(k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor) -> Tensor:
    """Do what `write_kv` does, with the same bytes; see there. At most `MOST_ROWS` tokens."""
    scale = kv.formats.k.scale
    assert isinstance(scale, Grouped), "checked by can_write_few"
    both = torch.stack((k, v)).float()  # [2, tokens, kv_heads, dim]
    finite = torch.isfinite(both).flatten(2).all(dim=-1)  # [2, tokens]
    codes, scales = encode_int4(both.nan_to_num(0.0, 0.0, 0.0), scale.group_size)
    block, offset = slots // kv.block_size, slots % kv.block_size
    for i, rows in enumerate((kv.k, kv.v)):
        rows.codes[block, :, offset] = codes[i]
        assert rows.scales is not None, "int4 stores scales"
        rows.scales[block, :, offset] = scales[i]
    return ~finite.all(dim=0)
