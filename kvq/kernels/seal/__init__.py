"""Quantize the blocks of a staged sequence that became old enough."""
