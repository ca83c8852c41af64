"""Requests: parameters, their checks, state, texts and outputs."""
