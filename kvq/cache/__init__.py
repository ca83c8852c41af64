"""The tensors behind the block pools, and the cache that transformers' own `generate` can use."""

from typing import TYPE_CHECKING, Any

from kvq.cache.kv_cache import KVCache
from kvq.cache.memory import available_bytes

if TYPE_CHECKING:
    from kvq.cache.attention import register_attention
    from kvq.cache.backend import cache_backend, cache_backends
    from kvq.cache.hf_cache import KvqCache
    from kvq.cache.prefix_file import load_prefix, save_prefix

_HOMES = {  # loaded when asked for: the cache itself needs no transformers
    "KvqCache": "kvq.cache.hf_cache",
    "cache_backend": "kvq.cache.backend",
    "cache_backends": "kvq.cache.backend",
    "load_prefix": "kvq.cache.prefix_file",
    "register_attention": "kvq.cache.attention",
    "save_prefix": "kvq.cache.prefix_file",
}

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
    if name not in _HOMES:
        raise AttributeError(f"module 'kvq.cache' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
