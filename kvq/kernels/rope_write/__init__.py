"""Heads normed, turned and stored: what lies between the QKV product and attention."""
