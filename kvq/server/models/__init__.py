"""Several models in one server: their engines, names that lead to versions, and roll-outs."""
