"""Steps of the engine: planned, launched, sampled and settled."""
