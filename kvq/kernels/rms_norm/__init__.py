"""Root mean square normalization of rows."""
