"""Checks that a model's files are intact before anything is loaded: safetensors, JSON and GGUF."""

import json
import math
from pathlib import Path
from typing import Any, TypeGuard

import xxhash

from kvq import strict_json
from kvq.errors import ModelError, explained, first_lines
from kvq.formats.tensor_entry import TensorEntry
from kvq.models.gguf.files import read_gguf
from kvq.models.gguf.header import MAGIC, read_gguf_header

UNREAD = {"C64": 64, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}  # not read
_DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16,
    "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    **UNREAD,
}  # fmt: skip
_MAX_HEADER_BYTES = 100 << 20
_CHUNK_BYTES = 1 << 20  # still in the L2 cache when they are hashed


def is_gguf(place: Path) -> bool:
    """Return True if a model is in GGUF files, of which `place` is the first; other models are folders."""
    return place.is_file()


def config_place(place: Path) -> str:
    """Return where a model's configuration is, for messages."""
    return f"{place}'s metadata" if is_gguf(place) else f"{place}/config.json"


def read_config_json(place: Path) -> dict[str, Any]:
    """Return the dict of a model folder's config.json, or what it would be for a model in GGUF files.

    Raises:
        ModelError: the file is missing or damaged, or kvq doesn't read a GGUF file's architecture.
    """
    return dict(read_gguf(place).config) if is_gguf(place) else read_json(place / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelError: the file is missing, unreadable or not a JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}; is it a Hugging Face model folder?") from error
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number of 5,000 digits
        raise ModelError(f"{path} is not JSON ({first_lines(error)}); download it again") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder, sharded or not, or the GGUF files of a model.

    Raises:
        ModelError: there are no safetensors files (only pickled weights, say), or the index names missing
            files.
    """
    if is_gguf(folder):
        return read_gguf(folder).paths
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        return _shards(folder, read_json(index))
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickled:
        raise ModelError(
            f"{folder} holds only pickled weights ({pickled[0]}), which can run code when read; "
            f"kvq loads safetensors: convert it with safetensors, or take a copy that has them"
        )
    raise ModelError(f"{folder} has no model.safetensors and no model.safetensors.index.json")


def _shards(folder: Path, index: dict[str, Any]) -> list[Path]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder}/model.safetensors.index.json has no weight_map; download it again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"model.safetensors.index.json names {name!r}, which is outside {folder}")
        if not (folder / name).is_file():
            raise ModelError(f"shard {name} of {folder} is missing; download the model again to resume")
    held: dict[str, str] = {}
    for name in names:
        for entry in read_header(folder / name):
            if entry.name in held:
                raise ModelError(f"{folder}: shards {held[entry.name]} and {name} both hold {entry.name}")
            held[entry.name] = name
    for tensor, name in weight_map.items():
        if held.get(tensor) != name:
            raise ModelError(f"shard {name} of {folder} lacks tensor {tensor}, which the index promises")
    return [folder / name for name in names]


def read_header(path: Path) -> list[TensorEntry]:
    """Return the tensors of a safetensors or GGUF file after checking its header against its size.

    Raises:
        ModelError: the file is truncated or too long, or its header is inconsistent.
    """
    with explained(ModelError, f"can't read {path}"), path.open("rb") as file:
        size = path.stat().st_size
        prefix = file.read(8)
        if prefix.startswith(MAGIC):  # as a safetensors header, this would be longer than any
            return read_gguf_header(path)[1]
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise _damaged(path, f"its header claims {length} bytes, the file has {size}")
        raw = file.read(length)
    try:
        header = strict_json.loads(raw)
    except ValueError as error:
        raise _damaged(path, f"its header is not JSON ({first_lines(error)})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    start = 8 + length
    entries = [_entry(path, name, info, start) for name, info in header.items() if name != "__metadata__"]
    at = start
    for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
        if entry.begin != at:
            raise _damaged(path, f"tensor {entry.name} starts at byte {entry.begin}, not {at}")
        at = entry.end
    if at != size:
        raise _damaged(path, f"its tensors end at byte {at}, the file has {size}")
    return entries


def _entry(path: Path, name: str, info: object, start: int) -> TensorEntry:
    if not isinstance(info, dict):
        raise _damaged(path, f"tensor {name} has no description")
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    bits = _DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None or not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise _damaged(path, f"tensor {name} has dtype {dtype!r}, shape {shape!r}, offsets {offsets!r}")
    nbytes = offsets[1] - offsets[0]
    if nbytes * 8 != math.prod(shape) * bits:
        raise _damaged(path, f"tensor {name} of {dtype} {shape} can't have {nbytes} bytes")
    begin, end = start + offsets[0], start + offsets[1]
    return TensorEntry(name=name, dtype=str(dtype), shape=tuple(shape), path=path, begin=begin, end=end)


def _is_counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 1 << 48 for x in values
    )


def _damaged(path: Path, why: str) -> ModelError:
    return ModelError(f"{path} is damaged: {why}; download or copy it again")


def content_digest(files: list[Path]) -> str:  # D209: every tensor's bytes: headers don't show a fine-tune
    """Return a digest of all tensors' names, shapes, dtypes and bytes, independent of sharding.

    The digest is a hexadecimal xxh3 hash. It distinguishes models and reveals flipped bits, but does not
    protect against deliberately forged weights.
    """
    lines = []
    # The buffer is reused: fresh memory costs more than reading
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    for path in files:
        entries = read_header(path)
        with path.open("rb") as file:
            for entry in entries:
                file.seek(entry.begin)
                hasher = xxhash.xxh3_128()
                for at in range(entry.begin, entry.end, _CHUNK_BYTES):
                    hasher.update(chunk[: file.readinto(chunk[: entry.end - at])])
                lines.append(f"{entry.name} {entry.dtype} {entry.shape} {hasher.hexdigest()}")
    return xxhash.xxh3_128("\n".join(sorted(lines)).encode()).hexdigest()
