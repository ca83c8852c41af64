"""The tensors behind the block pools, and the cache that transformers' own `generate` can use."""

from typing import TYPE_CHECKING, Any

from kvq.cache.kv_cache import KVCache
from kvq.cache.memory import available_bytes

if TYPE_CHECKING:
    from kvq.cache.attention import register_attention
    from kvq.cache.hf_cache import KvqCache

_HOMES = {  # loaded when asked for: the cache itself needs no transformers
    "KvqCache": "kvq.cache.hf_cache",
    "register_attention": "kvq.cache.attention",
}

__all__ = ["KVCache", "KvqCache", "available_bytes", "register_attention"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvq.cache' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
