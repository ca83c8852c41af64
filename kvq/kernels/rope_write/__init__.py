"""Norm, RoPE and storage of heads: the steps between the QKV product and attention."""
