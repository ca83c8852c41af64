"""Admission: bodies and prompts of requests, limits of rate and concurrency, and metrics."""
