"""Checkpoint writer: fills a temporary model folder shard by shard, then renames the folder in one step."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kvq import fileio
from kvq.errors import ConfigError, first_lines
from kvq.weights.manifest import MANIFEST, FileDigest, file_digest, manifest_bytes, read_manifest

_METADATA = {"format": "pt"}  # transformers refuses files without it
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 << 30


class CheckpointWriter:
    """Writer of a model folder, used as a context manager: `add` tensors, then `finish`.

    Everything is written to a temporary folder next to `out`, flushed to disk, and renamed at the end, so
    `out` is either complete or absent. At most one shard's tensors are kept in memory. After an error, the
    temporary folder is removed.
    """

    def __init__(self, out: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES, overwrite: bool = False) -> None:
        """Create the temporary folder. `overwrite`: replace a folder at `out` if it has a kvq manifest.

        Raises:
            ConfigError: `out` exists and may not be replaced, or the parent folder is not writable.
        """
        self._out = Path(os.path.abspath(out))
        self._max_shard_bytes = max_shard_bytes
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = 0
        # Shards have temporary names, since the final names contain their number
        self._shards: dict[str, FileDigest] = {}
        self._shard_of: dict[str, str] = {}  # keyed by tensor name
        self._total_bytes = 0
        self._aside: Path | None = None
        with self._explained():
            check_target(self._out, overwrite=overwrite)
            aside = self._out.with_name(f".{self._out.name}.partial-{secrets.token_hex(4)}")
            os.mkdir(aside)
            self._aside = aside

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Collect tensors, and write a shard whenever it is full.

        Raises:
            ConfigError: a tensor name is added twice, or writing fails.
        """
        with self._explained():
            self._check_open()
            for name, tensor in tensors.items():
                if name in self._shard or name in self._shard_of:
                    raise ConfigError(f"can't write {self._out}: tensor {name} was added twice")
                if self._shard and self._shard_bytes + tensor.nbytes > self._max_shard_bytes:
                    self._flush()
                self._shard[name] = tensor.detach().cpu().contiguous()
                self._shard_bytes += tensor.nbytes

    def finish(
        self, config: Mapping[str, Any], copied: Sequence[Path] = (), texts: Mapping[str, str] | None = None
    ) -> Path:
        """Write config.json, `copied` files, `texts` keyed by file name, and a manifest; rename the folder.

        Raises:
            ConfigError: there are no tensors, a file name is already in use, or writing fails.
        """
        with self._explained():
            folder = self._check_open()
            if self._shard:
                self._flush()
            if not self._shard_of:
                raise ConfigError(f"can't write {self._out}: it would hold no tensors")
            files: dict[str, FileDigest] = {}
            for name, text in {"config.json": _dumped(config), **(texts or {})}.items():
                self._write(files, name, text.encode())
            for path in copied:
                self._write(files, path.name, path.read_bytes())
            self._name_shards(files)
            _write_synced(folder / MANIFEST, manifest_bytes(files))
            _sync(folder)
            self._put_in_place(folder)
            self._aside = None
        return self._out

    def abort(self) -> None:
        """Abort, and remove the temporary folder."""
        self._shard.clear()
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)
            self._aside = None

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *_: object) -> None:
        """Abort unless `finish` succeeded."""
        self.abort()

    def _check_open(self) -> Path:
        """Return the temporary folder; raise ConfigError if it was renamed or removed."""
        if self._aside is None:
            raise ConfigError(f"{self._out} is finished or given up; make another CheckpointWriter")
        return self._aside

    def _flush(self) -> None:
        name = f"shard-{len(self._shards) + 1:05}"
        path = self._check_open() / name
        save_file(_apart(self._shard), path, _METADATA)
        fileio.as_new(path)  # safetensors creates files that only their owner can read
        _sync(path)
        self._shards[name] = file_digest(path)
        self._shard_of.update(dict.fromkeys(self._shard, name))
        self._total_bytes += self._shard_bytes
        self._shard, self._shard_bytes = {}, 0

    def _name_shards(self, files: dict[str, FileDigest]) -> None:
        """Rename the shards to the names that loaders expect, and write their index."""
        folder, count = self._check_open(), len(self._shards)
        names = {own: f"model-{i:05}-of-{count:05}.safetensors" for i, own in enumerate(self._shards, 1)}
        if count == 1:
            names = dict.fromkeys(names, "model.safetensors")
        else:
            weight_map = {name: names[own] for name, own in sorted(self._shard_of.items())}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            self._write(files, INDEX, _dumped(index).encode())
        for own, name in names.items():
            os.rename(folder / own, folder / name)
            files[name] = self._shards[own]

    def _write(self, files: dict[str, FileDigest], name: str, content: bytes) -> None:
        path = self._check_open() / name
        if Path(name).name != name or name == MANIFEST or name.endswith(".safetensors") or path.exists():
            raise ConfigError(f"can't write {self._out}: {name!r} is taken, or is no file name")
        _write_synced(path, content)
        files[name] = file_digest(path)

    def _put_in_place(self, folder: Path) -> None:
        """Rename the folder to `out`; if that fails, restore the folder that was to be replaced."""
        old = self._out.with_name(f".{self._out.name}.old-{secrets.token_hex(4)}")
        replaced = self._out.exists() and any(self._out.iterdir())
        if self._out.exists():
            _keep_all_permissions(folder, self._out)
        if replaced:
            os.rename(self._out, old)
        try:
            os.rename(folder, self._out)  # replaces an empty folder
        except BaseException:
            if replaced:
                os.rename(old, self._out)
            raise
        with suppress(OSError):  # a crash may undo the renaming, but both states are complete
            _sync(self._out.parent)
        if replaced:
            shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Abort after any error, and convert write errors to a ConfigError with the reason."""
        try:
            yield
        except BaseException as error:
            self.abort()
            if isinstance(error, OSError | SafetensorError):
                why = getattr(error, "strerror", None) or first_lines(error)
                raise ConfigError(f"can't write {self._out}: {why}; it was left as it was") from error
            raise


def check_target(out: Path, *, overwrite: bool) -> None:
    """Raise ConfigError unless a model folder may be written to `out`."""
    if not out.parent.is_dir():
        raise ConfigError(f"can't write {out}: there is no folder {out.parent}; create it first")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConfigError(f"can't write {out}: it is a file or a link; name a new folder")
    if not out.exists() or not any(out.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"can't write {out}: it is not empty; name a new folder, or give --overwrite")
    if read_manifest(out) is None:
        raise ConfigError(f"can't overwrite {out}: kvq didn't write it (no manifest); name a new folder")


def _keep_all_permissions(folder: Path, older: Path) -> None:
    """Copy the permissions of an older folder and its files to the new folder and files of the same names."""
    for path in folder.iterdir():
        if (older / path.name).is_file():
            fileio.keep_permissions(path, os.stat(older / path.name))
    fileio.keep_permissions(folder, os.stat(older))


def _dumped(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _write_synced(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _sync(path)


def _sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without shared memory, which safetensors rejects."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return apart
