"""Speculation: which parts propose drafts, how many drafts pay off, and which were accepted."""
