"""Embeddings, scores of pairs and ranked documents, of models made for them."""
