"""Parts of a model while it runs: steps, recurrent states, latents, norms and Linear layers."""
