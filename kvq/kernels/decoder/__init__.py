"""Decoder layers without attention: several operations in one call."""
