"""Norm, RoPE and storage of heads: all steps between the QKV product and attention."""
