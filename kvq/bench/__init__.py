"""Benchmarks that `kvq bench` runs; each checks correctness before it measures."""
