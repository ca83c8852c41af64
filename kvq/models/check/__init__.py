"""Checks that a KV format does not break a model, at load and for transformers models."""
