"""Capacity planning: the number of users that fit, the cost of tokens, and simulated fleets under load."""
