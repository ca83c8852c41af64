"""What a gated MLP does between its products."""
