"""Tests of benchmarks/tiers."""
