"""What is kept of prefixes that left the index: packed in their pools, or in the tiers below them."""
