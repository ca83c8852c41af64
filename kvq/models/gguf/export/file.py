"""Writer of a GGUF file: the header first, then one tensor after another, then the file's name.

Source: the GGUF specification, version 3.
"""

import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from kvq import fileio
from kvq.errors import ConfigError
from kvq.formats.ggml import GgmlType
from kvq.models.gguf.header import MAGIC, has_magic

_VERSION, _ALIGNMENT = 3, 32
_BOOL, _STRING, _ARRAY = 7, 8, 9
_INT, _UNSIGNED, _FLOAT = (5, "<i"), (4, "<I"), (6, "<f")

Kinds = Mapping[str, tuple[GgmlType, tuple[int, ...]]]  # type and shape, as torch writes it, by name


class GgufWriter:
    """Writer of one file, used as a context manager: `begin`, `add` each tensor in order, then `finish`.

    Everything is written beside `out` under another name, so that `out` is either whole or as it was.
    """

    def __init__(self, out: Path, *, overwrite: bool) -> None:
        """`overwrite`: replace a GGUF file at `out`.

        Raises:
            ConfigError: `out` exists and may not be replaced, or its folder is missing.
        """
        check_gguf_target(out, overwrite=overwrite)
        self._out = out
        self.path = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")  # until `finish`
        self._places: list[tuple[int, int]] = []  # begin and end in the file, of tensors not yet written
        self._tensors: Kinds = {}
        self._header_bytes = 0

    def begin(self, metadata: Mapping[str, Any], tensors: Kinds) -> None:
        """Write the header, and make the file as long as it will be; called again, it begins anew."""
        header = _header(metadata, tensors)
        at = self._header_bytes = len(header)
        self._tensors, self._places = tensors, []
        for kind, shape in tensors.values():
            size = prod(shape) // kind.values * kind.nbytes
            self._places.append((at, at + size))
            at += size + -size % _ALIGNMENT
        with self._explained(), self.path.open("wb") as file:
            file.write(header)
            file.truncate(at)

    def add(self, pieces: Iterable[Tensor]) -> None:
        """Write the next tensor's bytes, contiguous uint8 in pieces of any shape."""
        begin, end = self._places.pop(0)
        with self._explained(), self.path.open("r+b") as file:
            file.seek(begin)
            for raw in pieces:
                file.write(raw.cpu().numpy().tobytes())
            assert file.tell() == end, f"{file.tell() - begin} bytes for {end - begin}"

    def finish(self, metadata: Mapping[str, Any]) -> None:
        """Flush the file to disk, and give it its name and the permissions of a file that it replaces.

        `metadata`: as in the beginning, but strings may be others of the same lengths.
        """
        assert not self._places, f"{len(self._places)} tensors were not written"
        header = _header(metadata, self._tensors)
        assert len(header) == self._header_bytes, f"{len(header)} bytes for {self._header_bytes}"
        with self._explained():
            with self.path.open("r+b") as file:
                file.write(header)
                file.flush()
                os.fsync(file.fileno())
            if self._out.exists():
                fileio.keep_permissions(self.path, os.stat(self._out))
            os.replace(self.path, self._out)

    def __enter__(self) -> "GgufWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what is not finished."""
        self.path.unlink(missing_ok=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"can't write {self._out}: {error.strerror or error}") from error


def check_gguf_target(out: Path, *, overwrite: bool) -> None:
    """Raise ConfigError unless a GGUF file may be written to `out`."""
    if out.suffix.lower() != ".gguf":
        raise ConfigError(f"a GGUF model is one file, got --out {out}; name a file that ends in .gguf")
    if not out.parent.is_dir():
        raise ConfigError(f"can't write {out}: there is no folder {out.parent}; create it first")
    if out.is_symlink() or (out.exists() and not (out.is_file() and has_magic(out))):
        raise ConfigError(f"can't write {out}: something else is there; name a new file")
    if out.exists() and not overwrite:
        raise ConfigError(f"can't write {out}: it exists; name a new file, or ask to overwrite")


def _header(metadata: Mapping[str, Any], tensors: Kinds) -> bytes:
    parts = [struct.pack("<4sIQQ", MAGIC, _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        number, raw = _typed(value)
        parts += [_text(key), struct.pack("<I", number), raw]
    at = 0
    for name, (kind, shape) in tensors.items():
        dims = shape[::-1]
        parts.append(_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind.number, at))
        size = prod(shape) // kind.values * kind.nbytes
        at += size + -size % _ALIGNMENT
    header = b"".join(parts)
    return header + bytes(-len(header) % _ALIGNMENT)


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
