"""Tensors behind the block pools, and a cache for transformers' own `generate`."""

from typing import TYPE_CHECKING

from kvq.lazy import lazily

if TYPE_CHECKING:
    from kvq.cache.backend import cache_backend, cache_backends
    from kvq.cache.kv_cache import KVCache
    from kvq.cache.memory import available_bytes
    from kvq.cache.prefix_file import load_prefix, save_prefix
    from kvq.cache.transformers.attention import register_attention
    from kvq.cache.transformers.cache import KvqCache
else:
    __getattr__ = lazily(
        __name__,
        {
            "kvq.cache.transformers.attention": ("register_attention",),
            "kvq.cache.backend": ("cache_backend", "cache_backends"),
            "kvq.cache.transformers.cache": ("KvqCache",),
            "kvq.cache.kv_cache": ("KVCache",),
            "kvq.cache.memory": ("available_bytes",),
            "kvq.cache.prefix_file": ("load_prefix", "save_prefix"),
        },
    )

__all__ = [
    "KVCache", "KvqCache", "available_bytes", "cache_backend", "cache_backends", "load_prefix",
    "register_attention", "save_prefix",
]  # fmt: skip
