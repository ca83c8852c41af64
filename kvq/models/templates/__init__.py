"""Chat templates: the parts of a conversation that a model's template shows, and their forms."""
