"""The tensors of a model folder, read one by one from safetensors."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvq.errors import ModelError, first_lines


class StoredTensors(Mapping[str, Tensor]):
    """Names to tensors of several files; a tensor is mapped from its file when it is asked for."""

    def __init__(self, files: list[Path]) -> None:
        """Open the files.

        Raises:
            ModelError: one is damaged.
        """
        self._files: dict[str, tuple[Path, Any]] = {}
        for path in files:
            try:
                opened = safe_open(path, "pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} is damaged: {first_lines(error)}; download or copy it again"
                ) from error
            self._files |= dict.fromkeys(opened.keys(), (path, opened))

    def __getitem__(self, name: str) -> Tensor:
        path, opened = self._files[name]
        try:
            tensor: Tensor = opened.get_tensor(name)
        except (SafetensorError, TypeError, AttributeError) as error:  # a type that torch doesn't have
            raise ModelError(f"{path}: tensor {name} can't be read: {first_lines(error)}") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
