"""kvq's operations as torch operators, in the namespace `kvq`, for programs that compile or export.

Importing this package registers `torch.ops.kvq.write_kv`, `attend`, `attend_latent`, `gather_dense`,
`merge_partials`, `linear`, `packed_linear` and `looked_up_rows`. These operators take tensors, numbers and
format names, return new tensors, and run the kernels that `select` chooses. kvq's own engine calls kernels
directly, because torch's dispatcher takes longer than a small kernel.
"""

from kvq.kernels.ops.blocks import attend, attend_latent, gather_dense, merge_partials, write_kv
from kvq.kernels.ops.linear import keep, linear, looked_up_rows, packed_linear

__all__ = [
    "attend", "attend_latent", "gather_dense", "keep", "linear", "looked_up_rows", "merge_partials",
    "packed_linear", "write_kv",
]  # fmt: skip
