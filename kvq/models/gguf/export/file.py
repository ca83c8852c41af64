"""Writer of a GGUF file: the header first, then one tensor after another, then the file's name.

Source: the GGUF specification, version 3.
"""

import os
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq import fileio
from kvq.errors import ConfigError, explained
from kvq.formats.ggml import GgmlType, part_paths
from kvq.models.gguf.header import MAGIC, has_magic
from kvq.weights.manifest import manifest_path, write_manifest

_VERSION, _ALIGNMENT = 3, 32
_BOOL, _STRING, _ARRAY = 7, 8, 9
_INT, _UNSIGNED, _FLOAT = (5, "<i"), (4, "<I"), (6, "<f")

Kinds = Mapping[str, tuple[GgmlType, tuple[int, ...]]]  # type and shape, as torch writes it, by name


class GgufWriter:
    """Writer of one file, used as a context manager: `begin`, `add` each tensor in order, then `finish`.

    Everything is written beside `out` under another name, so that `out` is either whole or as it was.
    """

    def __init__(self, out: Path) -> None:
        """`out`: as `check_gguf_target` allows it."""
        self._out = out
        self.path = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")  # until `finish`
        self._tensors: Kinds = {}
        self._at = self._end = self._header_bytes = 0  # where the next tensor begins, and the last one ends

    def begin(self, metadata: Mapping[str, Any], tensors: Kinds, first: Iterable[Tensor] = ()) -> None:
        """Write the header and the `first` tensors, in a file as long as it will be; or begin anew."""
        header, self._tensors = _header(metadata, tensors), tensors
        self._at = self._header_bytes = len(header)
        self._end = self._at + sum(_padded_bytes(*one) for one in tensors.values())
        with self._explained(), self.path.open("wb") as file:
            file.write(header)
            file.truncate(self._end)
        for tensor in first:
            self.add([tensor.view(torch.uint8)])

    def add(self, pieces: Iterable[Tensor]) -> None:
        """Write the next tensor's bytes, contiguous uint8 in pieces of any shape."""
        with self._explained(), self.path.open("r+b") as file:
            file.seek(self._at)
            for raw in pieces:
                file.write(raw.cpu().numpy().tobytes())
            self._at = file.tell() + -file.tell() % _ALIGNMENT

    def finish(self, metadata: Mapping[str, Any]) -> None:
        """Flush the file to disk, give it its name and a replaced file's permissions, and write its manifest.

        `metadata`: as in the beginning, but strings may be others of the same lengths.
        """
        header = _header(metadata, self._tensors)
        assert (len(header), self._at) == (self._header_bytes, self._end), "other sizes than in the beginning"
        with self._explained():
            with self.path.open("r+b") as file:
                file.write(header)
                file.flush()
                os.fsync(file.fileno())
            if self._out.exists():
                fileio.keep_permissions(self.path, os.stat(self._out))
            manifest_path(self._out).unlink(missing_ok=True)  # it lists the older file
            os.replace(self.path, self._out)
        write_manifest(self._out)

    def __enter__(self) -> "GgufWriter":
        return self

    def __exit__(self, *_: object) -> None:
        """Remove what is not finished."""
        self.path.unlink(missing_ok=True)

    def _explained(self) -> AbstractContextManager[None]:
        return explained(ConfigError, f"can't write {self._out}")


def check_gguf_target(out: Path, *, overwrite: bool) -> None:
    """Raise ConfigError unless a GGUF file may be written to `out`."""
    if out.suffix.lower() != ".gguf":
        raise ConfigError(f"a GGUF model is one file, got --out {out}; name a file that ends in .gguf")
    if len(part_paths(out)) > 1:
        raise ConfigError(f"{out} names one part of a split model, and kvq writes one file; name another")
    if not out.parent.is_dir():
        raise ConfigError(f"can't write {out}: there is no folder {out.parent}; create it first")
    if out.is_symlink() or (out.exists() and not (out.is_file() and has_magic(out))):
        raise ConfigError(f"can't write {out}: something else is there; name a new file")
    if out.exists() and not overwrite:
        raise ConfigError(f"can't write {out}: it exists; name a new file, or give --overwrite")


def _header(metadata: Mapping[str, Any], tensors: Kinds) -> bytes:
    parts = [struct.pack("<4sIQQ", MAGIC, _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        number, raw = _typed(value)
        parts += [_text(key), struct.pack("<I", number), raw]
    at = 0
    for name, (kind, shape) in tensors.items():
        parts.append(
            _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind.number, at)
        )
        at += _padded_bytes(kind, shape)
    header = b"".join(parts)
    return header + bytes(-len(header) % _ALIGNMENT)


def _padded_bytes(kind: GgmlType, shape: Sequence[int]) -> int:
    size = prod(shape) // kind.values * kind.nbytes
    return size + -size % _ALIGNMENT


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Any) -> tuple[int, bytes]:
    """Return the number of a value's type, and its bytes; all values of a list are of one type."""
    if isinstance(value, bool):
        return _BOOL, struct.pack("<B", value)
    if isinstance(value, str):
        return _STRING, _text(value)
    if isinstance(value, Sequence):
        if isinstance(value[0], int):  # signed, also where scalars are not: llama.cpp wants them so
            return _ARRAY, struct.pack(f"<IQ{len(value)}i", _INT[0], len(value), *value)
        kinds, raws = zip(*map(_typed, value), strict=True)
        return _ARRAY, struct.pack("<IQ", kinds[0], len(raws)) + b"".join(raws)
    kind, form = _FLOAT if isinstance(value, float) else _UNSIGNED if value >= 0 else _INT
    return kind, struct.pack(form, value)
