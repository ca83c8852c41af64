"""Engine steps: how they are planned, launched, sampled and settled."""
