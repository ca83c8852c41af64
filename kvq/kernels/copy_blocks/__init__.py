"""Copy of complete blocks within a pool."""
