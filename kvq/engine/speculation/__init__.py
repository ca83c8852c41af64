"""Drafted tokens: who proposes them, how many are worth it, and what became of them."""
