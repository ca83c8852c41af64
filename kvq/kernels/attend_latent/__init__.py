"""Latent attention in its absorbed form: one stored row per token is the key and value of all query heads."""
