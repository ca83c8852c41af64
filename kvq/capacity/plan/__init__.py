"""Capacity plan: memory, users, GPUs and models, as facts and formulas."""
