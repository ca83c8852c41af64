"""Kernel benchmarks: attention, writing, Linear layers and tile tuning."""
