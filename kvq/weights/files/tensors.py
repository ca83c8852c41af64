"""Access to a checkpoint's tensors, with checks of names, dtypes and shapes."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvq.errors import ModelError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def take(
    tensors: Mapping[str, Tensor],
    name: str,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Return the tensor named `name`.

    Raises:
        ModelError: the tensor is missing, or has another dtype or shape.
    """
    found = tensors.get(name)
    if found is None:
        raise ModelError(f"tensor {name} is missing; the checkpoint or its quantization_config is damaged")
    if found.dtype not in dtypes:
        allowed = " or ".join(_short(dtype) for dtype in dtypes)
        raise ModelError(f"tensor {name} must be {allowed}, got {_short(found.dtype)}")
    if shape is not None and list(found.shape) != list(shape):
        raise ModelError(f"tensor {name} must have shape {list(shape)}, got {list(found.shape)}")
    return found


def take_matrix(tensors: Mapping[str, Tensor], name: str, dtypes: Sequence[torch.dtype]) -> Tensor:
    """Return a tensor like `take`, but of any two-dimensional shape without empty dimensions."""
    found = take(tensors, name, dtypes)
    if found.dim() != 2 or 0 in found.shape:
        raise ModelError(f"tensor {name} must be a matrix, got shape {list(found.shape)}")
    return found


def take_scale(tensors: Mapping[str, Tensor], name: str, shape: Sequence[int]) -> Tensor:
    """Return a float tensor of shape `shape`; raise ModelError if it contains NaN or infinity."""
    scale = take(tensors, name, FLOATS, shape)
    if not scale.isfinite().all():
        raise ModelError(f"tensor {name} holds NaN or infinity; download or copy the checkpoint again")
    return scale


def take_order(tensors: Mapping[str, Tensor], name: str, in_features: int, groups: int) -> Tensor | None:
    """Return the order of inputs, int64 [in], that makes a `g_idx`'s groups contiguous; None if they are.

    Raises:
        ModelError: an index is out of range, or groups differ in size.
    """
    index = take(tensors, name, (torch.int32, torch.int64), [in_features]).long()
    if index.min() < 0 or index.max() >= groups:
        raise ModelError(
            f"tensor {name} must hold groups 0 to {groups - 1}, got {int(index.min())} to {int(index.max())}"
        )
    sizes = torch.bincount(index, minlength=groups)
    if (sizes != in_features // groups).any():
        raise ModelError(
            f"tensor {name} must give each group {in_features // groups} inputs, "
            f"got {int(sizes.min())} to {int(sizes.max())}; kvq reads groups of equal sizes"
        )
    order = index.argsort(stable=True)
    return None if torch.equal(order, torch.arange(in_features)) else order


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
