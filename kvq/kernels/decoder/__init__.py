"""Decoder layers without their attention: several operations in one call."""
