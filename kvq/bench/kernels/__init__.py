"""Kernel benchmarks: attention, writing, Linear layers, and the tuner of tiles."""
