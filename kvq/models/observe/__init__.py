"""Geometry of models of unlisted families, found by running their code without values."""
