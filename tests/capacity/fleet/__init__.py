"""Fleets of simulated engines."""
