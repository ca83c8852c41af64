"""Geometry of models from unlisted families, found by running their code on the meta device."""
