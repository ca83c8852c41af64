"""Tests of benchmarks/agents."""
