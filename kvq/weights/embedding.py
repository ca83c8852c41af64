"""Tied embedding: one weight for lookups and the head, in the order in which the head's kernel reads it."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.ops import keep, looked_up_rows
from kvq.weights.linear import hooks_of

_TRIED = 3  # rows


class PackedEmbedding(nn.Module):
    """Embedding that looks rows up in the weight that a head multiplies by."""

    def __init__(self, kernel: CpuLinear, dtype: torch.dtype, scale: Tensor | None) -> None:
        """`dtype`: of the rows; `scale`: what they are multiplied with, if with anything."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = kernel.out_features, kernel.in_features
        self.kernel = kernel
        self._kernel_number = keep(kernel)
        self.dtype = dtype
        self.scale = None if scale is None else scale.detach().to(dtype)

    @property
    def weight(self) -> Tensor:
        """A copy of the weight, [rows, dim], for code that looks at it; the layer has its own."""
        values: Tensor = self.kernel.values()
        return values.to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """int64 [...] -> [..., dim]."""
        if torch.compiler.is_compiling():  # as in PackedLinear
            rows: Tensor = looked_up_rows(input, self._kernel_number, self.embedding_dim, self.dtype)
        else:
            rows = self.kernel.look_up(input, self.dtype)
        return rows if self.scale is None else rows * self.scale

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


@torch.inference_mode()
def is_plain_lookup(module: nn.Embedding) -> bool:
    """True if a module returns rows of its weight, perhaps times `embed_scale`; it is tried on some."""
    if any(hooks_of(module)) or module.max_norm is not None:
        return False
    ids = torch.arange(module.num_embeddings)[:: max(1, module.num_embeddings // _TRIED)]
    weight = torch.arange(module.num_embeddings * 2.0).remainder(997).view(-1, 2)
    weight = weight.to(module.weight.dtype)  # its own may have no numbers yet
    rows, scale = functional.embedding(ids, weight), scale_of(module)
    wanted = rows if scale is None else rows * scale.to(rows.dtype)
    found = functional_call(module, {"weight": weight}, ids)
    return isinstance(found, Tensor) and torch.equal(found, wanted)


def scale_of(module: nn.Embedding) -> Tensor | None:
    """Return the factor of an embedding's rows, in modules like Gemma's, or None."""
    scale = getattr(module, "embed_scale", None)
    return scale if scale is None or isinstance(scale, Tensor) else torch.tensor(float(scale))
