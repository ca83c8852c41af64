"""Engine under load, beside static and continuous batching over transformers."""
