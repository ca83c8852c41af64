"""Manifest of a model: the size and digest of every file, and a digest of the manifest itself.

kvq writes a manifest with each quantized model, and `kvq manifest` writes one for any other. A flipped bit
anywhere in the listed files or in the manifest is detected. The manifest does not protect against forged
files. A model's place is its folder or, of a model in GGUF files, the first of them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from kvq import fileio, strict_json
from kvq.errors import ModelError, explained, first_lines
from kvq.formats.ggml import part_paths

MANIFEST = "kvq-manifest.json"  # in a folder; beside x.gguf, x.gguf.kvq-manifest.json
_FORMAT_VERSION = 1
_CHUNK_BYTES = 8 << 20
_MAX_BYTES = 16 << 20
_FIELDS = ("bytes", "xxh3")
_READ = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.safetensors")  # read by loaders
_RECIPE = "kvq.json"

Tell = Callable[[int], object]  # called with the size in bytes of each chunk read
FileDigest = tuple[int, str]  # a file's size in bytes, and its xxh3_128 in hex


def file_digest(path: Path, tell: Tell = int) -> FileDigest:
    """Return the digest of a file; the caller must handle OSError."""
    hasher, nbytes = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
            nbytes += len(chunk)
            tell(len(chunk))
    return nbytes, hasher.hexdigest()


def manifest_bytes(files: Mapping[str, FileDigest]) -> bytes:
    """Return the manifest of these files; identical files result in identical bytes."""
    listed = {name: dict(zip(_FIELDS, file, strict=True)) for name, file in files.items()}
    content = {"files": listed, "format_version": _FORMAT_VERSION}
    return _canonical({**content, "digest": xxhash.xxh3_128(_canonical(content)).hexdigest()})


def manifest_path(place: Path) -> Path:
    """Return the path of a model's manifest, which need not exist."""
    return place / MANIFEST if place.is_dir() else place.with_name(f"{place.name}.{MANIFEST}")


def read_manifest(place: Path) -> dict[str, FileDigest] | None:
    """Return the files that a model's manifest lists, or None if there is no manifest.

    Raises:
        ModelError: the manifest is damaged: its bytes differ from those that kvq would write for its
        contents.
    """
    path = manifest_path(place)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise _damaged(place, f"it is larger than {_MAX_BYTES} bytes")
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        data = strict_json.loads(raw)
    except ValueError as error:
        raise _damaged(place, f"it is not JSON ({first_lines(error)})") from error
    files = _files(place, data)
    if manifest_bytes(files) != raw:
        raise _damaged(place, "digest: its bytes are not the ones it was written with")
    return files


def check_manifest(place: Path) -> dict[str, FileDigest]:
    """Return the files that a model's manifest lists, after checking all contents except safetensors.

    The result is empty if there is no manifest. Files added later are ignored unless they contain weights. A
    GGUF file is checked completely: it is configuration, tokenizer and weights in one.

    Raises:
        ModelError: a file is missing or has another size, contents differ, or weights were added.
    """
    files = read_manifest(place) or {}
    for fault in _faults(place, files, lambda name: not _holds_weights(name)):
        raise fault
    return files


def verify_manifest(place: Path) -> bool:  # D186: digests: readers accept flipped payload bits
    """Compare every file that a model's manifest lists; return False if there is no manifest.

    Raises:
        ModelError: as for `check_manifest`, or weights differ; the message names the file.
    """
    files = check_manifest(place)
    for fault in _faults(place, files, _holds_weights):
        raise fault
    return bool(files)


def find_faults(place: Path, files: Mapping[str, FileDigest], tell: Tell = int) -> list[ModelError]:
    """Return all differences between a model and its manifest."""
    return list(_faults(place, files, lambda name: True, tell))


def listed_files(place: Path) -> list[Path]:
    """Return the files to list in a model's new manifest: all files that it is loaded from."""
    if not place.is_dir():
        return part_paths(place)
    found = {path for pattern in _READ for path in place.glob(pattern) if path.is_file()}
    return sorted(path for path in found if not path.name.endswith(MANIFEST) and path.name[0] != ".")


def write_manifest(place: Path, tell: Tell = int) -> dict[str, FileDigest]:
    """Write a manifest of a model's current files, replacing any older one; return its entries.

    Raises:
        ModelError: a file can't be read.
        ConfigError: the manifest can't be written.
    """
    files = {path.name: _digest(path, tell) for path in listed_files(place)}
    fileio.write_bytes(manifest_path(place), manifest_bytes(files))
    return files


def relist(path: str | Path) -> None:
    """Update a new file's entry in its folder's manifest if the file is listed there or is kvq.json.

    Raises:
        ModelError: the manifest is damaged.
        ConfigError: the manifest can't be written.
    """
    path = Path(path)
    files = read_manifest(path.parent)
    if files is not None and (path.name in files or path.name == _RECIPE):
        content = manifest_bytes({**files, path.name: _digest(path)})
        fileio.write_bytes(path.parent / MANIFEST, content)


def _faults(
    place: Path, files: Mapping[str, FileDigest], is_read: Callable[[str], bool], tell: Tell = int
) -> Iterator[ModelError]:
    """Yield the differences of each file: content and size if `is_read(name)`, else size only."""
    manifest = manifest_path(place)
    for name, wanted in files.items():
        path = manifest.with_name(name)
        try:
            if (nbytes := path.stat().st_size) != wanted[0]:
                yield _damaged(place, f"bytes: {nbytes}, but {manifest.name} says {wanted[0]}", path)
            elif is_read(name) and (found := file_digest(path, tell)) != wanted:
                yield _damaged(place, f"xxh3: {found[1]}, but {manifest.name} says {wanted[1]}", path)
        except FileNotFoundError:
            yield _damaged(place, f"missing, but {manifest.name} lists it", path)
        except OSError as error:
            yield _unreadable(path, error)
    weights = sorted(place.glob("*.safetensors*")) if place.is_dir() else part_paths(place)
    for path in weights if files else []:
        if path.name not in files:
            yield ModelError(f"{path} is not listed in {manifest.name}; remove it, or write the model again")


def _holds_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def _digest(path: Path, tell: Tell = int) -> FileDigest:
    with explained(ModelError, f"can't read {path}"):
        return file_digest(path, tell)


def _files(place: Path, data: object) -> dict[str, FileDigest]:
    if not isinstance(data, dict) or not isinstance(data.get("files"), dict):
        raise _damaged(place, "files: it lists none")
    version = data.get("format_version")
    if type(version) is not int or version != _FORMAT_VERSION:
        raise _damaged(place, f"format_version: this kvq reads {_FORMAT_VERSION}, got {str(version)[:40]}")
    return {name: _file(place, name, entry) for name, entry in data["files"].items()}


def _file(place: Path, name: str, entry: object) -> FileDigest:
    if Path(name).name != name or "\0" in name or name.endswith(MANIFEST):
        raise _damaged(place, f"files: {name!r:.80} is no file of this folder")
    if not isinstance(entry, dict) or set(entry) != set(_FIELDS):
        raise _damaged(place, f"files: {name!r:.80} must have the fields {' and '.join(_FIELDS)}")
    nbytes, digest = entry["bytes"], entry["xxh3"]
    if type(nbytes) is not int or nbytes < 0 or not isinstance(digest, str):
        raise _damaged(place, f"files: bytes or xxh3 of {name!r:.80} is no number or no text")
    return nbytes, digest


def _canonical(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode("ascii")


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"can't read {path}: {error.strerror}")


def _damaged(place: Path, why: str, path: Path | None = None) -> ModelError:
    """Return the error of a file, by default of the manifest."""
    return ModelError(
        f"{path or manifest_path(place)} is damaged: {why}; copy the model again, or write it again; "
        f"if it was changed on purpose: kvq manifest {place} --overwrite"
    )
