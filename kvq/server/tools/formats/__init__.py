"""Formats of tool calls, one module per model family; `registry` looks them up by name or chat template."""
