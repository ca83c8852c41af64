"""Choosing tokens: many rows of logits at once, each with its own parameters and random stream."""

from kvq.engine.sampling.logprobs import TokenLogprobs, beam_candidates, prompt_logprobs
from kvq.engine.sampling.sampler import PendingSamples, Sampler, Samples
from kvq.engine.sampling.seeds import mix_seed

__all__ = [
    "PendingSamples",
    "Sampler",
    "Samples",
    "TokenLogprobs",
    "beam_candidates",
    "mix_seed",
    "prompt_logprobs",
]
