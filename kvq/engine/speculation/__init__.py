"""Speculation: proposing drafts, choosing how many pay off, and learning from the results."""
