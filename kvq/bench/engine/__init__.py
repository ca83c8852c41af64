"""Engine benchmark: kvq's engine under load, beside static and continuous batching of transformers."""
