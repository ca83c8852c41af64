"""Counting what a step launches on the imaginary GPU."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engine.imaginary_gpu import is_there

_FREE = {"empty", "empty_like", "new_empty", "empty_strided", "device"}  # allocate, or ask


class Launches(TorchDispatchMode):
    """Operations of torch on the imaginary GPU that are no views: kernels, and copies to or from it."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        there = [is_there(x) for x in tensors]
        name = func.overloadpacket.__name__
        if any(there) and not _is_view(func) and name not in _FREE:
            self.copies += not all(there)
            if all(there):
                self.kernels.append(name)
        return out


def _is_view(func: Any) -> bool:
    """True if what comes back is memory that went in, unwritten."""
    returned = [given.alias_info for given in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
