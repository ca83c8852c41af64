"""A request of OpenAI's protocol, from its prompts to the answer: whole, or in pieces as they come."""

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from time import time
from typing import Any, ClassVar
from uuid import uuid4

from kvq.engine import SamplingParams, TokenLogprobs
from kvq.engine.outputs import Piece
from kvq.server.bodies import Common
from kvq.server.messages import Ended
from kvq.server.sampling import terms_of
from kvq.server.seating import Seats
from kvq.server.service import Service
from kvq.server.streams import merge


@dataclass(slots=True)
class _Usage:
    """Tokens of all the prompts of a request."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def take(self, ended: Ended) -> None:
        if ended.receipt is not None:
            self.prompt += ended.receipt.prompt_tokens
            self.completion += ended.receipt.generated_tokens
            self.cached += ended.receipt.cached_tokens

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Answer(ABC):
    """That of one request, over `n` results of each of its prompts."""

    OBJECT: ClassVar[str]  # what an answer is called
    CHUNK: ClassVar[str]  # and a piece of one
    ID: ClassVar[str]  # what ids begin with

    def __init__(
        self, service: Service, body: Common, params: SamplingParams, tenant: str, *, num_prompts: int = 1
    ) -> None:
        self._service = service
        self._n = params.n
        self._terms = terms_of(body, params, tenant)
        self._options = body.stream_options
        self._id, self._created = f"{self.ID}-{uuid4().hex}", int(time())
        self._usage = _Usage()
        self._prompts: list[list[int]] = []
        self._scores: dict[int, list[TokenLogprobs | None]] = {}  # of prompts, by their index
        self.seats = Seats(prompts=num_prompts, sequences=params.num_sequences)

    @property
    @abstractmethod
    def is_heavy(self) -> bool:
        """With log-probabilities."""

    async def answer(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            Problem: it can't be served, or failed.
        """
        results = await self._results()

        def choices() -> list[dict[str, Any]]:
            return [self._choice(index, whole) for index, whole in enumerate(results)]

        done = await asyncio.to_thread(choices) if self.is_heavy else choices()
        return self._head(self.OBJECT) | {"choices": done, "usage": self._usage.body()}

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The answer in pieces, as they come.

        Raises:
            Problem: it can't be served, or failed on the way.
        """
        async with aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                if (choice := self._delta(index, piece)) is not None:
                    yield self._head(self.CHUNK) | {"choices": [choice]}
        if self._options is not None and self._options.include_usage:
            yield self._head(self.CHUNK) | {"choices": [], "usage": self._usage.body()}

    @abstractmethod
    async def _read(self) -> list[list[int]]:
        """The prompts' tokens."""

    @abstractmethod
    def _choice(self, index: int, whole: Piece) -> dict[str, Any]:
        """A whole result."""

    @abstractmethod
    def _delta(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """What a step added to a result; None if that is nothing to tell."""

    async def _results(self) -> list[Piece]:
        """What the pieces of each result add up to."""
        wholes = defaultdict[int, Piece](_nothing)
        async with aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                _add(wholes[index], piece)
        return [wholes[index] for index in range(len(self._prompts) * self._n)]

    async def _pieces(self) -> AsyncGenerator[tuple[int, Piece]]:
        """(index of the result, what a step added to it); what ended prompts used is noted."""
        self._prompts = await self._read()
        streams = [self._service.stream(tokens, self._terms, self.seats) for tokens in self._prompts]
        async with aclosing(merge(streams)) as messages:
            async for i, message in messages:
                if isinstance(message, Ended):
                    self._usage.take(message)
                    self._scores[i] = message.prompt_logprobs or []
                else:
                    yield i * self._n + message.index, message

    def _head(self, object: str) -> dict[str, Any]:
        return {"id": self._id, "object": object, "created": self._created, "model": self._service.name}


def reason_of(piece: Piece) -> str | None:
    """Why a result ended, in OpenAI's words."""
    return "stop" if piece.finish_reason == "cancelled" else piece.finish_reason


def _nothing() -> Piece:
    return Piece(request_id="", index=0, text="", token_ids=[], logprobs=[])


def _add(whole: Piece, piece: Piece) -> None:
    whole.text += piece.text
    whole.token_ids += piece.token_ids
    if whole.logprobs is not None:
        whole.logprobs += piece.logprobs or ()
    whole.finish_reason = piece.finish_reason
