"""Quantize the blocks of a staged sequence that have become old enough."""
