"""The tensors behind the block pools."""

from kvq.cache.kv_cache import KVCache
from kvq.cache.memory import available_bytes

__all__ = ["KVCache", "available_bytes"]
