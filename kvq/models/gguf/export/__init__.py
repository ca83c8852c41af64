"""GGUF files from transformers' models: metadata, tensors' names and order, and the bytes."""
