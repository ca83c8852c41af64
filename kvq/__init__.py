"""kvq: quantized, block-managed KV caches, and an honest look at what they cost."""

__version__ = "0.1.0"
