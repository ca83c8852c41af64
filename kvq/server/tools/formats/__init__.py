"""Formats of tool calls, one module per model family; `registry` finds them by name or chat template."""
