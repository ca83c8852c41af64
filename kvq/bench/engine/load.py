"""Load of an engine benchmark: requests, their arrival times, and the queue that hands them out."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvq.capacity.lengths import Lengths
from kvq.errors import ConfigError
from kvq.scheduler import Priority

if TYPE_CHECKING:  # a client of a server has no model
    from kvq.models import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRequest:
    """Request of a load."""

    index: int
    prompt: list[int]
    output_tokens: int
    arrival_s: float = 0.0  # after the start of the run; closed loops ignore it
    priority: Priority = Priority.INTERACTIVE

    @property
    def tokens(self) -> int:
        """Tokens of prompt and output together."""
        return len(self.prompt) + self.output_tokens


def burst(model: "Model", requests: int, prompt: tuple[int, int], output: tuple[int, int]) -> "Load":
    """Return a load of batch priority whose requests all arrive at once; lengths are (low, high)."""
    return Load(
        num_requests=requests,
        input_lengths=Lengths(low=prompt[0], high=prompt[1]),
        output_lengths=Lengths(low=output[0], high=output[1]),
        vocab_size=model.geometry.vocab_size,
        max_context=model.weights.max_context,
        priority=Priority.BATCH,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Load to draw requests from. Lengths and arrivals are the same in every repeat, token ids are not."""

    num_requests: int
    input_lengths: Lengths
    output_lengths: Lengths
    vocab_size: int
    max_context: int  # tokens; log-normal lengths are cut to it
    rate: float = math.inf  # requests per second, with exponential gaps
    shared_prefix: float = 0.0  # share of each prompt that is the same for all
    priority: Priority = Priority.INTERACTIVE
    seed: int = 0

    def __post_init__(self) -> None:
        longest = sum(n.high for n in (self.input_lengths, self.output_lengths))
        if longest > self.max_context:
            raise ConfigError(
                f"requests of up to {longest} tokens don't fit the model's context of {self.max_context}; "
                f"use a shorter --input-len or --output-len"
            )
        if not self.rate > 0:
            raise ConfigError(f"--rate must be above 0 requests per second, got {self.rate}")

    def draw(self, repeat: int) -> list[LoadRequest]:
        """Return the requests of one repeat, in order of arrival."""
        shape, ids = random.Random(self.seed), random.Random(f"{self.seed}/{repeat}")
        vocabulary = range(self.vocab_size)
        common = ids.choices(vocabulary, k=self.max_context) if self.shared_prefix else []
        requests, now = [], 0.0
        for index in range(self.num_requests):
            prompt_tokens, output_tokens = self._lengths(shape)
            prompt = common[: round(self.shared_prefix * prompt_tokens)]
            prompt += ids.choices(vocabulary, k=prompt_tokens - len(prompt))
            if math.isfinite(self.rate):
                now += shape.expovariate(self.rate)
            requests.append(
                LoadRequest(
                    index=index,
                    prompt=prompt,
                    output_tokens=output_tokens,
                    arrival_s=now,
                    priority=self.priority,
                )
            )
        return requests

    def _lengths(self, rng: random.Random) -> tuple[int, int]:
        prompt_tokens = min(self.input_lengths.draw(rng), self.max_context - 1)
        return prompt_tokens, min(self.output_lengths.draw(rng), self.max_context - prompt_tokens)


class ArrivalQueue:
    """Queue of requests: each is due at its arrival time or, with `users`, when one of them is free."""

    def __init__(self, requests: Sequence[LoadRequest], users: int | None) -> None:
        self._requests = requests
        self._users = users
        self._next = 0

    @property
    def is_done(self) -> bool:
        """True if every request was handed out."""
        return self._next == len(self._requests)

    def due(self, now: float, num_ended: int) -> list[tuple[LoadRequest, float]]:
        """Remove and return the due requests, each with its due time in seconds.

        `num_ended`: requests that have ended so far.
        """
        found = []
        while not self.is_done and self.wait_s(now, num_ended) <= 0:
            request = self._requests[self._next]
            self._next += 1
            found.append((request, request.arrival_s if self._users is None else now))
        return found

    def wait_s(self, now: float, num_ended: int) -> float:
        """Return seconds until the next request is due; infinite if none is left or one has to end first."""
        if self.is_done:
            return math.inf
        if self._users is None:
            return max(0.0, self._requests[self._next].arrival_s - now)
        return 0.0 if self._next - num_ended < self._users else math.inf
