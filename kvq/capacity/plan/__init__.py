"""What fits: memory, users, GPUs and models, as facts and formulas."""
