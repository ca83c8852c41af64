"""Admission: request bodies and prompts, limits of rate and concurrency, and metrics."""
