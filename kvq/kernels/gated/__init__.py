"""Gating of an MLP, between its matrix products."""
