"""Dequantization of a sequence's blocks into dense K and V."""
