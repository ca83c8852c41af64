"""Loading of weights and tokenizers, and replacement of a model's layers with fused ones."""
