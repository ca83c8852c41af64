"""The attention under which kvq's sessions run their models.

It is one function with `kvq.cache`'s, registered under a name without a mask function beside it.
"""

from kvq.cache.attention import PACKED_NAME as NAME
from kvq.cache.attention import kvq_attention, register_attention

__all__ = ["NAME", "kvq_attention", "register_attention"]
