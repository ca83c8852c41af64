"""Serde `kvq` for LMCache's L2 adapters. Requires LMCache.

    {"type": "fs", "base_path": "/cache", "serde": {"type": "kvq", "kv": "int4", "head_dim": 128}}

`kv` accepts the same values as `--kv`: a format, a K/V pair, or a kvq.json, which includes `head_dim`.
"""

import threading
from pathlib import Path

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    SerdeProcessor,
    Serializer,
    get_registered_serde_types,
    register_serde_factory,
)
from lmcache.v1.memory_management import MemoryObj
from torch import Tensor

from kvq.errors import ConfigError, DamagedData, unknown
from kvq.formats import KVRecipe
from kvq.integrations.lmcache.chunk import ChunkCodec, check_recipe

NAME = "kvq"
_OPTIONS = ("kv", "head_dim", "max_workers")


class _Codecs:
    """Codecs of one configuration: one per chunk layout and thread."""

    def __init__(self, kv: str | KVRecipe, head_dim: int | None = None) -> None:
        """Raise ConfigError if a recipe file can't be read."""
        self._kv = KVRecipe.named(Path(kv), []) if isinstance(kv, str) and kv.endswith(".json") else kv
        self._head_dim = head_dim
        self._own = threading.local()

    def of(self, shape: torch.Size, dtype: torch.dtype) -> ChunkCodec:
        """Return the codec for chunks of shape [2, layers, tokens, channels].

        Raises:
            ConfigError: the chunk has another layout, or can't be stored in the format.
        """
        if len(shape) != 4 or shape[0] != 2:
            raise ConfigError(
                f"the serde kvq codes chunks [2, layers, tokens, channels] of K and V, got {list(shape)}: "
                f"latents (MLA) and other states go without it"
            )
        known: dict[object, ChunkCodec] = self._own.__dict__.setdefault("codecs", {})
        kind = (shape[1], shape[3], dtype)
        if kind not in known:
            known[kind] = ChunkCodec(
                self._kv, num_layers=shape[1], channels=shape[3], dtype=dtype, head_dim=self._head_dim
            )
        return known[kind]


class _Serializer(Serializer):  # type: ignore[misc]  # LMCache has no types
    """Serializer from K and V chunks to kvq blocks."""

    def __init__(self, codecs: _Codecs) -> None:
        self._codecs = codecs

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        """Encode `src` into `dst`; return the number of bytes, which equals `estimate_serialized_size`.

        Raises:
            ConfigError: the chunk can't be encoded, or `dst` has too few bytes.
            NumericalError: K or V contain NaN or infinity.
        """
        out, done = dst.raw_tensor.view(torch.uint8)[: dst.get_size()], 0
        for part, chunk in enumerate(_chunks(src)):
            done += self._codecs.of(chunk.shape, chunk.dtype).encode(chunk, out[done:], _place(key, part))
        return done

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Return the exact size in bytes of an encoded chunk with this layout."""
        kinds = zip(layout_desc.shapes, layout_desc.dtypes, strict=True)
        return sum(self._codecs.of(shape, dtype).nbytes(shape[2]) for shape, dtype in kinds)


class _Deserializer(Deserializer):  # type: ignore[misc]
    """Deserializer from kvq blocks to K and V chunks; checks every byte before decoding."""

    def __init__(self, codecs: _Codecs) -> None:
        self._codecs = codecs

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Dequantize `src` into `dst`.

        Raises:
            DamagedData: `src` was not stored under this key, or was changed. LMCache then logs a miss.
        """
        content, done = src.raw_tensor.view(torch.uint8)[: src.get_size()], 0
        for part, chunk in enumerate(_chunks(dst)):
            codec = self._codecs.of(chunk.shape, chunk.dtype)
            size = codec.nbytes(chunk.shape[2])
            codec.decode(content[done : done + size], chunk, _place(key, part))
            done += size
        if done != content.numel():
            raise DamagedData(
                f"a stored chunk has {content.numel()} bytes, expected {done}; compute it again"
            )


def register() -> None:
    """Register the serde for LMCache's configuration. Further calls do nothing."""
    if NAME not in get_registered_serde_types():
        register_serde_factory(NAME, make_processor)


def make_processor(options: dict[str, object]) -> SerdeProcessor:
    """Return the serde configured by the `"serde"` object of an adapter.

    Raises:
        ConfigError: an option is unknown, missing or out of range.
    """
    for name in options:
        if name not in _OPTIONS:
            raise ConfigError(unknown("option of the serde kvq", name, _OPTIONS))
    kv, head_dim = options.get("kv"), _count(options, "head_dim")
    if not isinstance(kv, str):
        raise ConfigError(f"the serde kvq needs kv, such as 'int4', 'int8/int4' or 'kvq.json', got {kv!r}")
    if not kv.endswith(".json"):
        if head_dim is None:
            raise ConfigError(f"the serde kvq needs the model's head_dim with kv={kv!r}")
        check_recipe(KVRecipe.uniform(kv, [(head_dim, head_dim)]))  # checked now, not at the first chunk
    codecs, workers = _Codecs(kv, head_dim), _count(options, "max_workers") or 1
    return AsyncSerdeProcessor(_Serializer(codecs), _Deserializer(codecs), max_workers=workers)


def _count(options: dict[str, object], name: str) -> int | None:
    count = options.get(name)
    if count is None or (isinstance(count, int) and not isinstance(count, bool) and count >= 1):
        return count
    raise ConfigError(f"{name} of the serde kvq must be a number of at least 1, got {count!r}")


def _chunks(memory: MemoryObj) -> list[Tensor]:
    return [memory.get_tensor(part) for part in range(len(memory.get_shapes()))]


def _place(key: ObjectKey, part: int) -> str:
    """Return the place name of a chunk, which is different for each part of the chunk."""
    names = (key.chunk_hash.hex(), key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, part)
    return "\n".join(map(str, names))
