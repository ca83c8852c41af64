"""The tensors behind the block pools, and the cache that transformers' own `generate` can use."""

from typing import TYPE_CHECKING, Any

from kvq.cache.attention import register_attention
from kvq.cache.backend import cache_backend, cache_backends
from kvq.cache.kv_cache import KVCache
from kvq.cache.memory import available_bytes
from kvq.cache.prefix_file import load_prefix, save_prefix

if TYPE_CHECKING:
    from kvq.cache.hf_cache import KvqCache

__all__ = [
    "KVCache",
    "KvqCache",
    "available_bytes",
    "cache_backend",
    "cache_backends",
    "load_prefix",
    "register_attention",
    "save_prefix",
]


def __getattr__(name: str) -> Any:
    if name != "KvqCache":  # loaded when asked for: the cache itself needs no transformers
        raise AttributeError(f"module 'kvq.cache' has no attribute {name!r}")
    from kvq.cache.hf_cache import KvqCache

    return KvqCache
