"""Responses in OpenAI's protocol, built from a request's prompts: complete, or streamed as generated."""

import asyncio
from abc import abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from time import time
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

from kvq.engine import SamplingParams, TokenLogprobs
from kvq.engine.requests.outputs import ExactReceipt, Piece, Receipt
from kvq.server.admission.bodies import Common
from kvq.server.admission.service import Service
from kvq.server.admission.slots import SequenceSlots
from kvq.server.engine.messages import Ended
from kvq.server.openai.respond import Call
from kvq.server.openai.sampling import options_of

T = TypeVar("T")


class Answer(Call):
    """Response to one request, with `n` results for each of its prompts."""

    OBJECT: ClassVar[str]  # type of a whole answer
    CHUNK: ClassVar[str]  # type of a piece
    ID: ClassVar[str]  # prefix of response ids

    def __init__(
        self, service: Service, body: Common, params: SamplingParams, tenant: str, *, num_prompts: int = 1
    ) -> None:
        self._service = service
        self._n = params.n
        self._request = replace(options_of(body, params, tenant), adapter=service.adapter_of(body.model))
        self._options = body.stream_options
        self._id, self._created = f"{self.ID}-{uuid4().hex}", int(time())
        self._receipts: list[Receipt] = []  # receipts of prompts that ended
        self._exact: dict[int, ExactReceipt] = {}  # of an exact engine, by prompt
        self._prompts: list[Sequence[int]] = []
        self._scores: dict[int, list[TokenLogprobs | None]] = {}  # log-probabilities of prompts, by index
        self.is_heavy = params.logprobs is not None
        self.slots = SequenceSlots(prompts=num_prompts, sequences=params.num_sequences)

    async def answer(self) -> dict[str, Any]:
        results = await self._results()

        def choices() -> list[dict[str, Any]]:
            return [self._choice(index, whole) for index, whole in enumerate(results)]

        done = await asyncio.to_thread(choices) if self.is_heavy else choices()
        return self._head(self.OBJECT) | {"choices": done, "usage": self._usage()}

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        async with aclosing(await self._pieces()) as pieces:
            async for index, piece in pieces:
                if (choice := self._delta(index, piece)) is not None:
                    yield self._head(self.CHUNK) | {"choices": [choice]}
        if self._options is not None and self._options.include_usage:
            yield self._head(self.CHUNK) | {"choices": [], "usage": self._usage()}

    @abstractmethod
    async def _read(self) -> list[Sequence[int]]:
        """Return the token ids of each prompt."""

    @abstractmethod
    def _choice(self, index: int, whole: Piece) -> dict[str, Any]:
        """Return a complete result in OpenAI's form."""

    @abstractmethod
    def _delta(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """Return the delta that one step adds to a result, or None if there is nothing to send."""

    async def _results(self) -> list[Piece]:
        """Return all results, each concatenated from its pieces."""
        wholes = defaultdict[int, Piece](
            lambda: Piece(request_id="", index=0, text="", token_ids=[], logprobs=[])
        )
        async with aclosing(await self._pieces()) as pieces:
            async for index, piece in pieces:
                _add(wholes[index], piece)
        return [wholes[index] for index in range(len(self._prompts) * self._n)]

    async def _pieces(self) -> AsyncGenerator[tuple[int, Piece]]:
        """Yield pairs (index of a result, piece of that result) as the pieces are generated."""
        self._prompts = await self._read()
        streams = [self._pieces_of(i, tokens) for i, tokens in enumerate(self._prompts)]
        return streams[0] if len(streams) == 1 else _merge(streams)

    async def _pieces_of(self, i: int, tokens: Sequence[int]) -> AsyncGenerator[tuple[int, Piece]]:
        first = i * self._n
        async with aclosing(self._service.stream(tokens, self._request, self.slots)) as messages:
            async for message in messages:
                if isinstance(message, Ended):
                    self._scores[i] = message.prompt_logprobs or []
                    if message.receipt is not None:
                        self._receipts.append(message.receipt)
                        if message.receipt.exact:
                            self._exact[i] = message.receipt.exact
                else:
                    yield first + message.index, message

    def _usage(self) -> dict[str, Any]:
        prompt = sum(used.prompt_tokens for used in self._receipts)
        generated = sum(used.generated_tokens for used in self._receipts)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(used.cached_tokens for used in self._receipts)},
        }
        if misses := [used.miss.facts() for used in self._receipts if used.miss]:
            usage["prompt_tokens_details"]["misses"] = misses
        if drafted := sum(used.drafted_tokens for used in self._receipts):
            accepted = sum(used.accepted_tokens for used in self._receipts)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            }
        if self._exact:
            usage["exact_receipts"] = [asdict(self._exact[i]) for i in sorted(self._exact)]
        return usage

    def _head(self, object: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": object,
            "created": self._created,
            "model": self._request.adapter or self._service.name,
        }


def reason_of(piece: Piece) -> str | None:
    """Return a result's `finish_reason` in OpenAI's terms."""
    return "stop" if piece.finish_reason == "cancelled" else piece.finish_reason


def _add(whole: Piece, piece: Piece) -> None:
    whole.text += piece.text
    whole.token_ids += piece.token_ids
    if whole.logprobs is not None:
        whole.logprobs += piece.logprobs or ()
    whole.finish_reason = piece.finish_reason


async def _merge(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield the items of several streams as they arrive; the first failure closes all streams."""
    queue: asyncio.Queue[T | BaseException | None] = asyncio.Queue(64)

    async def pump(stream: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
        except Exception as error:  # noqa: BLE001 - raised by the consumer
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
