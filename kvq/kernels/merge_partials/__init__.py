"""Merge attention over parts of a context by log-sum-exp."""
