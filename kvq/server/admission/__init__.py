"""Admission: request bodies and prompts, rate and concurrency limits, and metrics."""
