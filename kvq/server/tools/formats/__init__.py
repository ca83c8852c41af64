"""Formats of tool calls, one model family a module; `registry` finds them by name or chat template."""
