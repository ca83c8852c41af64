"""Config and tensors of a model: of a folder, GGUF files, or the text part of a multimodal model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvq.errors import ModelError, first_lines
from kvq.formats.checkpoints import with_modelopt_config
from kvq.formats.tensor_entry import TensorEntry
from kvq.geometry.support import KINDS, text_config, text_name
from kvq.models.describe.checkpoint import UNREAD, is_gguf, read_config_json, read_header, weight_files
from kvq.models.describe.pooling import SCORE_HEAD, lacks_head
from kvq.models.gguf.files import read_gguf
from kvq.models.gguf.tensors import GgufTensors


def is_whole(folder: Path) -> bool:
    """Return True if a folder contains a multimodal model, of which only the text part is served."""
    return str(read_config_json(folder).get("model_type")) in KINDS


def is_read_apart(folder: Path) -> bool:
    """Return True if transformers can't load a causal language model from the files as they are."""
    return is_whole(folder) or is_gguf(folder) or lacks_head(folder)


def namer(folder: Path) -> Callable[[str], str | None]:
    """Return a function that maps a folder's tensor names to kvq's, or to None outside the text part."""
    if is_whole(folder):
        return text_name
    return (lambda name: None if name == SCORE_HEAD else name) if lacks_head(folder) else str


def read_config(folder: Path) -> dict[str, Any]:
    """Return a model's config.json, or its text part, with quantization settings from other files.

    Raises:
        ModelError: the file is missing, unreadable or not a JSON object.
    """
    config = with_modelopt_config(folder, read_config_json(folder))
    if lacks_head(folder):  # D431: the embedding serves as one
        config["tie_word_embeddings"] = True
    return text_config(config) or config


def read_entries(folder: Path) -> tuple[TensorEntry, ...]:
    """Return the text part's tensors that have a dtype kvq can read, under kvq's names.

    Raises:
        ModelError: files are damaged or missing.
    """
    return tuple(entry for entry in _all_entries(folder) if entry.dtype not in UNREAD)


def read_unread(folder: Path) -> dict[str, str]:
    """Return the dtypes of the text part's tensors that kvq can't read, keyed by kvq's names."""
    return {entry.name: entry.dtype for entry in _all_entries(folder) if entry.dtype in UNREAD}


def _all_entries(folder: Path) -> Iterator[TensorEntry]:
    if is_gguf(folder):
        yield from (source.tensor for source in read_gguf(folder).sources.values())
        return
    named = namer(folder)
    for path in weight_files(folder):
        for entry in read_header(path):
            if (name := named(entry.name)) is not None:
                yield replace(entry, name=name)


class _StoredTensors(Mapping[str, Tensor]):
    """Mapping from names to tensors in several files; each tensor is memory-mapped on access."""

    def __init__(self, files: list[Path], named: Callable[[str], str | None] = str) -> None:
        """Open the files. `named`: maps a stored name to kvq's name, or to None to omit the tensor.

        Raises:
            ModelError: a file is damaged.
        """
        self._files: dict[str, tuple[Path, Any, str]] = {}  # path, open file, stored name
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
        """Return the file that contains a tensor."""
        return self._files[name][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


ModelTensors = _StoredTensors | GgufTensors


def read_tensors(folder: Path) -> ModelTensors:
    """Return a model's tensors, keyed by kvq's names and read on access; those of GGUF are dequantized.

    Raises:
        ModelError: files are damaged or missing.
    """
    if is_gguf(folder):
        return GgufTensors(read_gguf(folder).sources)
    named, unread = namer(folder), read_unread(folder)
    return _StoredTensors(weight_files(folder), lambda name: None if (own := named(name)) in unread else own)


def read_other_tensor(folder: Path, name: str) -> Tensor | None:
    """Return a tensor that is not a part of the causal language model, or None if there is none."""
    return _StoredTensors(weight_files(folder)).get(name)
