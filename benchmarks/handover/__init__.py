"""Measurements of hand-overs."""
