"""Simulated fleet of engines under load, with the real scheduler and blocks and modelled step times."""
