"""Commands that measure and improve quality: perplexity, eval, tune, quantize and others."""
