"""Quantization of new K and V rows, which are scattered into their slots."""
