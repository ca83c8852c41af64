"""Decoder layers but for their attention: several operations in one call."""
