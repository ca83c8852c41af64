"""Attention of new tokens over quantized blocks."""
