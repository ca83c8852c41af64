"""Proof that a model computes the same over kvq's cache as over its own."""
