"""Gated MLPs that rows choose among: mixtures of experts."""
