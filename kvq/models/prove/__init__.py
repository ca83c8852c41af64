"""Proof that a model computes the same results over kvq's cache as over its own."""
