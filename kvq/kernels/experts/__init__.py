"""Mixtures of experts: gated MLPs, of which each row uses a few."""
