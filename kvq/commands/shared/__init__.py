"""Shared parts of commands: options, terminal output, tables, results and errors."""
