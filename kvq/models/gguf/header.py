"""Header of a GGUF file: its metadata and the places of its tensors. No tensor is read.

Every count and length is compared with the bytes that are left before anything is allocated for it, so a
damaged or forged file ends in an error. Source: the GGUF specification, versions 2 and 3.
"""

import mmap
from dataclasses import replace
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any

from kvq.errors import ModelError, explained
from kvq.formats.ggml import TYPES_BY_NUMBER, UNREAD_TYPES, GgmlType
from kvq.formats.tensor_entry import TensorEntry

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 64 << 20  # files of 262,144 tokens have 15 MB
_ALIGNMENT = 32  # bytes, unless the metadata say otherwise
_LARGEST = 1 << 63  # bytes or values of a tensor
_MAX_DIMS = 4
_MAX_DEPTH = 4  # of arrays in arrays
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_LEAST_BYTES = {_STRING: 8, _ARRAY: 12} | {kind: Struct(f"<{code}").size for kind, code in _NUMBERS.items()}
_KEY_BYTES, _TENSOR_BYTES = 13, 32  # at least, with their names' lengths
_U32, _U64 = Struct("<I"), Struct("<Q")
_AGAIN = "download or copy it again"


def has_magic(path: Path) -> bool:
    """Return True if a file begins as a GGUF file does; the caller must handle OSError."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf_header(path: Path) -> tuple[dict[str, Any], list[TensorEntry]]:
    """Return the metadata and the tensors of a GGUF file, after comparing its header with the file's size.

    Bytes of strings that are no UTF-8 are kept as lone surrogates.

    Raises:
        ModelError: the file is unreadable or damaged, or kvq doesn't read its version or a type.
    """
    # D381: gguf's reader takes seconds
    with explained(ModelError, f"can't read {path}"), path.open("rb") as file:
        size = file.seek(0, 2)
        if size < 24:
            raise _Reader(path, b"", size).damaged(0, f"it has {size} bytes, fewer than any GGUF file")
        with mmap.mmap(file.fileno(), min(size, _MAX_HEADER_BYTES), access=mmap.ACCESS_READ) as data:
            return _Reader(path, data, size).header()


class _Reader:
    """Position in a header."""

    def __init__(self, path: Path, data: "mmap.mmap | bytes", size: int) -> None:
        """`data`: the file's first bytes; `size`: of the file."""
        self._path, self._data, self._size, self._at = path, data, size, 0
        self._what = "the header"

    def header(self) -> tuple[dict[str, Any], list[TensorEntry]]:
        self._check_version()
        num_tensors, num_keys = self._number(_U64), self._number(_U64)
        self._check_count(num_keys, _KEY_BYTES, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            at, key = self._at, self._name()
            if key in metadata:
                raise self.damaged(at, f"the key {key!r:.80} occurs twice")
            self._what = f"the key {key!r:.80}"
            (metadata[key],) = self._values(self._number(_U32), 1)
        self._what = "the list of tensors"
        self._check_count(num_tensors, _TENSOR_BYTES, "tensors")
        found = [self._tensor() for _ in range(num_tensors)]
        return metadata, self._placed(found, metadata)

    def damaged(self, at: int, why: str) -> ModelError:
        return ModelError(f"{self._path} is damaged at byte {at}: {why}; {_AGAIN}")

    def _check_version(self) -> None:
        if (magic := bytes(self._data[:4])) != MAGIC:
            raise ModelError(
                f"{self._path} is no GGUF file: it begins with {magic!r}, not {MAGIC!r}; name a GGUF "
                f"file, or a folder with config.json and safetensors"
            )
        self._at = 4
        version = self._number(_U32)
        if version not in _VERSIONS:
            raise ModelError(
                f"{self._path} has version {version} of GGUF, or is big-endian; kvq reads {_VERSIONS[0]} and "
                f"{_VERSIONS[1]}, little-endian; convert the model again with a current llama.cpp"
            )

    def _check_count(self, count: int, least: int, what: str) -> None:
        left = len(self._data) - self._at
        if count * least > left:
            why = f"{self._what} claims {count} {what} of {least} bytes or more, but {left} bytes are left"
            raise self.damaged(self._at, why)

    def _number(self, form: Struct) -> Any:
        end = self._at + form.size
        if end > len(self._data):
            raise self._cut(self._at)
        (value,) = form.unpack_from(self._data, self._at)
        self._at = end
        return value

    def _cut(self, at: int) -> ModelError:
        if self._size > len(self._data):
            return self.damaged(at, f"its header has more than {_MAX_HEADER_BYTES} bytes, in {self._what}")
        return self.damaged(at, f"the file ends there, after {self._size} bytes, in {self._what}")

    def _name(self) -> str:
        at = self._at
        (raw,) = self._strings(1)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.damaged(at, f"the name {raw[:80]!r} is not UTF-8") from error

    def _strings(self, count: int) -> list[bytes]:
        found: list[bytes] = []
        data, at, end = self._data, self._at, len(self._data)
        length_at, append = _U64.unpack_from, found.append
        for _ in range(count):  # with local names: a vocabulary has hundreds of thousands
            if at + 8 > end:
                raise self._cut(at)
            begin = at + 8
            at = begin + length_at(data, at)[0]
            if at > end:
                why = f"a string of {at - begin} bytes, in {self._what}, passes the end of the header"
                raise self.damaged(begin - 8, why)
            append(data[begin:at])
        self._at = at
        return found

    def _values(self, kind: int, count: int, depth: int = 0) -> list[Any]:
        if kind not in _LEAST_BYTES:
            why = f"{self._what} has values of type {kind}, which GGUF doesn't have"
            raise self.damaged(self._at - 4, why)
        self._check_count(count, _LEAST_BYTES[kind], "values")
        if kind == _ARRAY:
            if depth == _MAX_DEPTH:
                raise self.damaged(self._at, f"{self._what} has arrays, more than {_MAX_DEPTH} deep")
            return [self._values(self._number(_U32), self._number(_U64), depth + 1) for _ in range(count)]
        if kind == _STRING:
            return [raw.decode("utf-8", "surrogateescape") for raw in self._strings(count)]
        form = Struct(f"<{count}{_NUMBERS[kind]}")
        found = list(form.unpack_from(self._data, self._at))
        self._at += form.size
        return list(map(bool, found)) if kind == _BOOL else found

    def _tensor(self) -> TensorEntry:
        """Return a tensor as if all data began at byte 0."""
        at, name = self._at, self._name()
        self._what = f"tensor {name!r:.80}"
        num_dims = self._number(_U32)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self.damaged(at, f"{self._what} has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible")
        shape = tuple(self._number(_U64) for _ in range(num_dims))[::-1]
        if 0 in shape or prod(shape) >= _LARGEST:
            raise self.damaged(at, f"{self._what} of shape {list(shape)} is empty or too large")
        kind, offset = self._kind(self._number(_U32)), self._number(_U64)
        if shape[-1] % kind.values:
            why = f"{self._what} has rows of {shape[-1]} values, and blocks of {kind.name} have {kind.values}"
            raise self.damaged(at, why)
        end = offset + prod(shape) // kind.values * kind.nbytes
        return TensorEntry(name=name, dtype=kind.name, shape=shape, path=self._path, begin=offset, end=end)

    def _kind(self, number: int) -> GgmlType:
        if number not in TYPES_BY_NUMBER:
            named = UNREAD_TYPES.get(number, f"type number {number}")
            known = ", ".join(kind.name for kind in TYPES_BY_NUMBER.values())
            raise ModelError(
                f"{self._path}: {self._what} is stored as {named}, which kvq doesn't read; take a file in "
                f"one of {known}"
            )
        return TYPES_BY_NUMBER[number]

    def _placed(self, found: list[TensorEntry], metadata: dict[str, Any]) -> list[TensorEntry]:
        """Return the tensors with their places in the file, after checking that they are whole and apart."""
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            why = f"the key 'general.alignment' must be a power of two, got {alignment!r:.80}"
            raise self.damaged(0, why)
        start, last = -(-self._at // alignment) * alignment, None
        for tensor in sorted(found, key=lambda one: one.begin):
            at, what = start + tensor.begin, f"tensor {tensor.name!r:.80}"
            if tensor.begin % alignment:
                why = f"{what} begins at {tensor.begin}, which is no multiple of {alignment} bytes"
                raise self.damaged(at, why)
            if last is not None and tensor.begin < last.end:
                raise self.damaged(at, f"{what} overlaps tensor {last.name!r:.80}")
            last = tensor
        if last is not None and (missing := start + last.end - self._size) > 0:
            raise ModelError(
                f"{self._path} is truncated: it has {self._size} bytes, and tensor {last.name!r:.80} ends at "
                f"byte {start + last.end}, so {missing} bytes are missing; {_AGAIN}"
            )
        return [replace(one, begin=start + one.begin, end=start + one.end) for one in found]
