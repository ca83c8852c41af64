"""Loads of `kvq bench vllm` (a burst of requests, and decode steps at a depth), and the model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvq.bench.engine.load import LoadRequest, burst
from kvq.bench.random_model import random_model
from kvq.bench.vllm.engine import STEP_TOKENS
from kvq.errors import ConfigError
from kvq.models import Model
from kvq.models.loading.prepared import prepare
from kvq.models.model import load_prepared

RANDOM: dict[str, Any] = {  # a Llama with a few heads of 128 elements
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 16_384,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
WARM_UP = 4  # steps
CLOCKED = 8  # steps whose parts are timed, in a separate pass
_VLLM_BLOCK = 128  # tokens, on CPUs
_FEW, _FEW_TOKENS = 4, 8  # numbers of requests and output tokens compared before timing


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmLoad:
    """Load of equally long requests that all arrive at once.

    With `steps`, prompts are computed first, and a sample consists of that many steps, each with a token for
    every request. Otherwise, a sample is the entire load, including prompts.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    steps: int | None = None

    @property
    def name(self) -> str:
        """Name of the load in result rows."""
        if self.steps is None:
            return f"{self.requests} x {self.prompt_tokens}/{self.output_tokens}"
        return f"{self.requests} at depth {self.prompt_tokens}"

    @property
    def lasting_tokens(self) -> int:
        """Number of output tokens that keeps a request running until all steps are measured.

        The first requests already get tokens while the last prompts are computed.
        """
        computing = -(-self.requests * self.prompt_tokens // STEP_TOKENS) + self.requests
        return computing + WARM_UP + CLOCKED + self.output_tokens

    @property
    def tokens(self) -> int:
        """Maximum number of tokens of a finished request."""
        return self.prompt_tokens + self.lasting_tokens

    @property
    def sample_tokens(self) -> int:
        """Number of output tokens in a sample."""
        return self.requests * (self.output_tokens if self.steps is None else self.steps)

    @property
    def cache_tokens(self) -> int:
        """Number of tokens of all finished requests, rounded up to full blocks, plus a spare block each."""
        return self.requests * (-(-self.tokens // _VLLM_BLOCK) + 1) * _VLLM_BLOCK

    def draw(self, model: Model, repeat: int = 0) -> list[LoadRequest]:
        """Return the requests of one repeat.

        Raises:
            ConfigError: the model's context is too short.
        """
        prompt, output = (self.prompt_tokens,) * 2, (self.output_tokens,) * 2
        return burst(model, self.requests, prompt, output).draw(repeat)

    def lasting(self, model: Model) -> list[LoadRequest]:
        """Return the load's requests, with enough output tokens to keep running while steps are measured."""
        return [replace(one, output_tokens=self.lasting_tokens) for one in self.draw(model)]

    def few(self, model: Model) -> list[LoadRequest]:
        """Return a few requests to compare, with a similar total number of prompt tokens for every load."""
        count = max(1, min(_FEW, self.requests, 4096 // self.prompt_tokens))
        return [replace(one, output_tokens=_FEW_TOKENS) for one in self.draw(model)[:count]]


def make_loads(burst: Sequence[int], deep: Sequence[int], repeats: int) -> tuple[VllmLoad, VllmLoad]:
    """Return the burst, and the load at a depth, whose requests last for all repeats.

    `burst`: requests, prompt tokens, output tokens; `deep`: requests, depth, steps per sample.

    Raises:
        ConfigError: a load is empty.
    """
    if min(burst) < 1 or burst[2] < 2:
        raise ConfigError(f"--burst needs requests, prompts and 2 or more output tokens, got {tuple(burst)}")
    if min(deep) < 1:
        raise ConfigError(f"--deep needs requests, a depth and steps, got {tuple(deep)}")
    requests, depth, steps = deep
    return (
        VllmLoad(requests=burst[0], prompt_tokens=burst[1], output_tokens=burst[2]),
        VllmLoad(requests=requests, prompt_tokens=depth, output_tokens=repeats * steps, steps=steps),
    )


def require_context(loads: Sequence[VllmLoad], most: int) -> None:
    """Raise ConfigError if requests would grow to more than `most` tokens."""
    for load in loads:
        if load.tokens > most:
            option = "--burst" if load.steps is None else "--deep"
            raise ConfigError(
                f"{option} {load.name}: requests grow to {load.tokens} tokens through all samples, the "
                f"model's context is {most}; give a smaller {option} or fewer --repeats"
            )


def make_model(folder: Path, dtype: str) -> Model:
    """Return a model with random weights, written to `folder` for vLLM."""
    random_model(RANDOM, folder, torch.device("cpu"), stored=True)
    return read_model(folder, dtype)


def read_model(folder: str | Path, dtype: str) -> Model:
    """Load a model from files that vLLM also reads.

    Raises:
        ModelError: the model is missing, damaged or not supported.
        ConfigError: the dtype is unknown.
    """
    prepared = prepare(folder, dtype=dtype)
    return load_prepared(prepared, prepared.recipe("auto"))
