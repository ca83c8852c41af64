"""Engine benchmark: kvq's engine under load, compared with transformers' static and continuous batching."""
