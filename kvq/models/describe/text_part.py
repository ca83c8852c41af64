"""The language part of a checkpoint that reads images or sound too; nothing of the other parts is read."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvq.formats.checkpoints import with_modelopt_config
from kvq.geometry.support import KINDS, text_config, text_name
from kvq.models.describe.checkpoint import UNREAD, TensorEntry, read_header, read_json, weight_files
from kvq.models.describe.stored import StoredTensors


def is_whole(folder: Path) -> bool:
    """True if a folder holds a model whose text part alone is served."""
    return str(read_json(folder / "config.json").get("model_type")) in KINDS


def namer(folder: Path) -> Callable[[str], str | None]:
    """Return a function from a folder's tensor names to kvq's; it returns None for those of other parts."""
    return text_name if is_whole(folder) else str


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json, of its text part, with what other files say of quantized weights.

    Raises:
        ModelError: missing, unreadable, or not a JSON object.
    """
    config = with_modelopt_config(folder, read_json(folder / "config.json"))
    return text_config(config) or config


def read_entries(folder: Path) -> tuple[TensorEntry, ...]:
    """A folder's tensors, of its text part, under the names that it has for them, of types that kvq reads.

    Raises:
        ModelError: damaged or missing files.
    """
    return tuple(entry for entry in _all_entries(folder) if entry.dtype not in UNREAD)


def read_unread(folder: Path) -> dict[str, str]:
    """Return the other tensors' types, by the same names."""
    return {entry.name: entry.dtype for entry in _all_entries(folder) if entry.dtype in UNREAD}


def _all_entries(folder: Path) -> Iterator[TensorEntry]:
    named = namer(folder)
    for path in weight_files(folder):
        for entry in read_header(path):
            if (name := named(entry.name)) is not None:
                yield replace(entry, name=name)


def read_tensors(folder: Path) -> StoredTensors:
    """Return a folder's tensors, ready to be read, by kvq's names.

    Raises:
        ModelError: damaged or missing files.
    """
    named, unread = namer(folder), read_unread(folder)
    return StoredTensors(weight_files(folder), lambda name: None if (own := named(name)) in unread else own)
