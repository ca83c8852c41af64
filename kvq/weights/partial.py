"""The folder that a model is written to before it has its name: whole shards, and a journal to go on from."""

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from kvq.errors import ConfigError
from kvq.weights.manifest import FileDigest, read_manifest

_JOURNAL = "journal.json"
_METADATA = {"format": "pt"}  # transformers refuses files without it


@dataclass(slots=True)
class Partial:
    """Shards on disk, under names of their own: the final ones tell how many there are."""

    folder: Path
    key: str | None  # of what decides the tensors; None: never resumed
    shards: dict[str, FileDigest] = field(default_factory=dict)
    shard_of: dict[str, str] = field(default_factory=dict)  # by tensor
    total_bytes: int = 0  # of all tensors

    @classmethod
    def open(cls, out: Path, key: str | None) -> "Partial":
        """Make the folder beside `out`; with a key, go on from one that was left with the same key."""
        if key is None:
            folder = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")
            os.mkdir(folder)
            return cls(folder, None)
        partial = cls(out.with_name(f".{out.name}.partial"), key)
        partial.folder.mkdir(exist_ok=True)
        partial._resume()
        return partial

    def add_shard(self, tensors: Mapping[str, Tensor]) -> None:
        """Write one shard, whole and flushed, and enter it in the journal."""
        name = f"shard-{len(self.shards) + 1:05}"
        path = self.folder / name
        save_file(_apart(tensors), path, _METADATA)
        os.chmod(path, 0o644)  # as the other files
        sync(path)
        self.shards[name] = FileDigest.of(path)
        self.shard_of.update(dict.fromkeys(tensors, name))
        self.total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self.key is not None:
            self._save_journal()

    def forget(self) -> None:
        """Remove the journal: from here on nothing is resumed."""
        if self.key is not None:
            os.unlink(self.folder / _JOURNAL)

    def discard(self) -> None:
        """Remove the folder, unless its journal lets another writer go on."""
        if not (self.folder / _JOURNAL).exists():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _save_journal(self) -> None:
        content = {
            "key": self.key,
            "shards": {name: [file.nbytes, file.xxh3] for name, file in self.shards.items()},
            "shard_of": self.shard_of,
            "total_bytes": self.total_bytes,
        }
        aside = self.folder / f"{_JOURNAL}.new"
        write_synced(aside, json.dumps(content).encode())
        os.replace(aside, self.folder / _JOURNAL)
        sync(self.folder)

    def _resume(self) -> None:
        journal = _journal(self.folder / _JOURNAL)
        if journal.get("key") == self.key and self._holds(journal["shards"]):
            self.shards = {name: FileDigest(nbytes=n, xxh3=x) for name, (n, x) in journal["shards"].items()}
            self.shard_of, self.total_bytes = journal["shard_of"], journal["total_bytes"]
        keep = {_JOURNAL, *self.shards} if self.shards else set()
        for path in self.folder.iterdir():
            if path.name not in keep:
                path.unlink()

    def _holds(self, shards: Mapping[str, list[Any]]) -> bool:
        for name, (nbytes, xxh3) in shards.items():
            path = self.folder / name
            if not path.is_file() or FileDigest.of(path) != FileDigest(nbytes=nbytes, xxh3=xxh3):
                return False
        return True


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


def _journal(path: Path) -> dict[str, Any]:
    """A journal as `_save_journal` wrote it; of anything else an empty one: nothing is resumed."""
    try:
        content = json.loads(path.read_bytes())
        shapely = (
            isinstance(content["key"], str)
            and all(len(entry) == 2 for entry in content["shards"].values())
            and set(content["shard_of"].values()) == set(content["shards"])
            and type(content["total_bytes"]) is int
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return content if shapely else {}


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, none sharing memory with another, which safetensors refuses."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return apart
