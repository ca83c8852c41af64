"""The tensors of a model folder, read one by one from safetensors."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvq.errors import ModelError, first_lines


class StoredTensors(Mapping[str, Tensor]):
    """Names to tensors of several files; a tensor is mapped from its file when it is asked for."""

    def __init__(self, files: list[Path], named: Callable[[str], str | None] = str) -> None:
        """Open the files. `named`: what a tensor is called here, None for one that is left out.

        Raises:
            ModelError: one is damaged.
        """
        self._files: dict[str, tuple[Path, Any, str]] = {}  # and its name there
        for path in files:
            try:
                opened = safe_open(path, "pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} is damaged: {first_lines(error)}; download or copy it again"
                ) from error
            for name in opened.keys():  # noqa: SIM118
                if (own := named(name)) is not None:
                    self._files[own] = path, opened, name

    def __getitem__(self, name: str) -> Tensor:
        path, opened, there = self._files[name]
        try:
            tensor: Tensor = opened.get_tensor(there)
        except (SafetensorError, TypeError, AttributeError) as error:  # a type that torch doesn't have
            raise ModelError(f"{path}: tensor {name} can't be read: {first_lines(error)}") from error
        return tensor

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._files[name][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
