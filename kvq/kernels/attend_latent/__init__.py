"""Latent attention in its absorbed form: one stored row a token is key and value of all query heads."""
