"""Retrieval: needles hidden in long texts, and questions about them."""
