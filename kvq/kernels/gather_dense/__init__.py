"""Dequantize blocks of a sequence into dense K and V."""
