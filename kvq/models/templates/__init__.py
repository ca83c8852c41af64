"""What a model's chat template does with what it is given."""
