"""Subcommands of `kvq bench`."""
