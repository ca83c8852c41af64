"""Checks that a KV format does not break a model, at load time and for transformers models."""
