"""Gating of an MLP, between its products."""
