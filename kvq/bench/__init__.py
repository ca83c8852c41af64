"""Benchmarks of `kvq bench`; each checks correctness before it measures."""
