"""Generated sessions (draft)."""
