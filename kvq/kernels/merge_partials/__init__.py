"""Merging of attention over parts of a context by log-sum-exp."""
