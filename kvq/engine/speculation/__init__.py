"""Speculation: proposes drafts, chooses how many pay off, and learns from the results."""
