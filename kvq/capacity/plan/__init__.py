"""Capacity plan: facts and formulas about memory, users, GPUs and models."""
