"""Packed blocks: blocks in fewer bits than their pool's format, which stay in the pool."""
