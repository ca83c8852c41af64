"""KvqCache: kvq's blocks as a cache of transformers, and the attention functions registered there."""
