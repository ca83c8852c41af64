"""Tests of what is written to GGUF files."""
