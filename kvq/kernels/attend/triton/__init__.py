"""Attention over blocks in Triton: launches, the kernels, and their device functions."""
