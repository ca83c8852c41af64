"""Running a model's code on torch's meta device, where nothing has numbers.

What it would choose by numbers, such as the tokens of an expert, it then chooses none of.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributions import Distribution
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def numberless() -> Iterator[None]:
    """Within it, nothing is found in a tensor without numbers that isn't zero, and nothing is validated."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        with _NothingChosen():  # type: ignore[no-untyped-call]
            yield
    finally:
        Distribution.set_default_validate_args(before)


class _NothingChosen(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.nonzero.default and (x := args[0]).is_meta:
            return x.new_empty((0, x.ndim), dtype=torch.int64)
        return func(*args, **(kwargs or {}))
