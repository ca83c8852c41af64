"""Quantization of a staged sequence's blocks that have become old enough."""
