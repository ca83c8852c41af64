"""Tiers below the block pools: blocks that left them, in host memory and in files. No torch."""
