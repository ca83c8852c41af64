"""KvqCache: kvq's blocks as a transformers cache, and the attention functions registered there."""
