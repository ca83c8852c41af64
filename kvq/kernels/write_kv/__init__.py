"""Quantize new K and V rows and scatter them into their slots."""
