"""Sampling of tokens for many rows of logits at once, each with its own parameters and random stream."""
