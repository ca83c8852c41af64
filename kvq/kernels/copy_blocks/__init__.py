"""Copy whole blocks inside a pool."""
