"""Copying of complete blocks within a pool."""
