"""Commands that run a model: generate, serve, run-batch, detect-watermark and demo."""
