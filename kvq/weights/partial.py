"""The folder that a model is written to before it has its name."""

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from kvq import fileio
from kvq.errors import ConfigError
from kvq.weights.manifest import FileDigest, read_manifest

_METADATA = {"format": "pt"}  # transformers refuses files without it


@dataclass(slots=True)
class Partial:
    """Shards on disk, under names of their own: the final ones tell how many there are."""

    folder: Path
    shards: dict[str, FileDigest] = field(default_factory=dict)
    shard_of: dict[str, str] = field(default_factory=dict)  # by tensor
    total_bytes: int = 0  # of all tensors

    @classmethod
    def open(cls, out: Path) -> "Partial":
        """Make the folder beside `out`."""
        folder = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")
        os.mkdir(folder)
        return cls(folder)

    def add_shard(self, tensors: Mapping[str, Tensor]) -> None:
        """Write one shard, whole and flushed."""
        name = f"shard-{len(self.shards) + 1:05}"
        path = self.folder / name
        save_file(_apart(tensors), path, _METADATA)
        fileio.as_new(path)  # safetensors' own are their owner's alone
        sync(path)
        self.shards[name] = FileDigest.of(path)
        self.shard_of.update(dict.fromkeys(tensors, name))
        self.total_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def check_target(out: Path, *, overwrite: bool) -> None:
    """Raise ConfigError unless a model folder may be put at `out`."""
    if not out.parent.is_dir():
        raise ConfigError(f"can't write {out}: there is no folder {out.parent}; create it first")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConfigError(f"can't write {out}: it is a file or a link; name a new folder")
    if not out.exists() or not any(out.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"can't write {out}: it is not empty; name a new folder, or ask to overwrite")
    if read_manifest(out) is None:
        raise ConfigError(f"can't overwrite {out}: kvq didn't write it (no manifest); name a new folder")


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, none sharing memory with another, which safetensors refuses."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return apart
