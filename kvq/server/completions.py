"""`POST /v1/completions`."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from kvq.engine import SamplingParams
from kvq.engine.outputs import Piece
from kvq.server.answers import Choice, Head, Usage, completion_logprobs, reason_of
from kvq.server.bodies import CompletionBody
from kvq.server.messages import Ended
from kvq.server.problems import Problem
from kvq.server.sampling import completion_params, terms_of
from kvq.server.seating import Seats
from kvq.server.service import Service
from kvq.server.streams import all_of, merge


class Completion:
    """One request, of one prompt or several."""

    def __init__(self, service: Service, body: CompletionBody, tenant: str) -> None:
        """Raises Problem: something in it that this server does not do."""
        service.check_model(body.model)
        if body.suffix is not None:
            raise Problem(400, "suffix is not supported: this model fills in no middles", param="suffix")
        self._params = completion_params(body)
        if body.stream and (self._params.prompt_logprobs is not None or self._params.best_of is not None):
            raise Problem(
                400, "best_of, and echo with logprobs, are known only at the end; don't stream them"
            )
        if body.max_tokens == 0 and (body.stream or not body.echo):
            raise Problem(400, "max_tokens 0 only scores: with echo, not streamed", param="max_tokens")
        self._terms = terms_of(body, self._params, tenant)
        self._service = service
        self._body = body
        self._tenant = tenant
        self._head = Head.new("cmpl", service.name)
        given: Any = body.prompt
        self._given = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        self.seats = Seats(prompts=len(self._given), sequences=self._params.num_sequences)

    @property
    def is_heavy(self) -> bool:
        """With log-probabilities."""
        return self._body.logprobs is not None

    async def answer(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            Problem: it can't be served, or failed.
        """
        prompts = await self._prompts()
        per_prompt = await all_of([self._complete(tokens) for tokens in prompts])
        usage = Usage()
        for tokens, (found, ended) in zip(prompts, per_prompt, strict=True):
            usage.take(ended)
            if self._body.max_tokens == 0:
                found[:] = [Choice(text=await self._text(tokens), finish_reason="length")] * len(found)
        if self._body.max_tokens == 0:
            usage.completion = 0
        build = partial(self._choices, prompts, per_prompt)
        choices = await asyncio.to_thread(build) if self.is_heavy else build()
        return self._head.body("text_completion") | {"choices": choices, "usage": usage.body()}

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The answer in pieces, as they come.

        Raises:
            Problem: it can't be served, or failed on the way.
        """
        usage, offsets = Usage(), dict[int, int]()
        streams = [self._stream(tokens) for tokens in await self._prompts()]
        async with aclosing(merge(streams)) as messages:
            async for i, message in messages:
                if isinstance(message, Ended):
                    usage.take(message)
                    continue
                index = i * self._body.n + message.index
                choice = self._piece(index, message, offsets.get(index, 0))
                offsets[index] = offsets.get(index, 0) + len(message.text)
                yield self._head.body("text_completion") | {"choices": [choice]}
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield self._head.body("text_completion") | {"choices": [], "usage": usage.body()}

    def _stream(self, tokens: list[int]) -> AsyncGenerator[Piece | Ended]:
        return self._service.stream(tokens, self._terms, self.seats)

    async def _complete(self, tokens: list[int]) -> tuple[list[Choice], Ended]:
        return await collect(self._stream(tokens), self._params)

    async def _prompts(self) -> list[list[int]]:
        prompts = [await self._tokens(prompt) for prompt in self._given]
        for i, tokens in enumerate(prompts):
            self._service.check_prompt(tokens, self._params, "prompt" if len(prompts) == 1 else f"prompt.{i}")
        return prompts

    async def _tokens(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return await self._service.prompts.tokenize(prompt, tenant=self._tenant)

    async def _text(self, prompt: list[int]) -> str:
        given = self._body.prompt
        return (
            given
            if isinstance(given, str)
            else await self._service.prompts.detokenize(prompt, tenant=self._tenant)
        )

    def _choices(
        self, prompts: list[list[int]], per_prompt: list[tuple[list[Choice], Ended]]
    ) -> list[dict[str, Any]]:
        return [
            self._choice(i * self._body.n + j, choice, prompts[i], ended)
            for i, (found, ended) in enumerate(per_prompt)
            for j, choice in enumerate(found)
        ]

    def _choice(self, index: int, choice: Choice, prompt: list[int], ended: Ended) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            before = ended.prompt_logprobs or []
            ids = [*(prompt if before else ()), *choice.token_ids]
            entries = [*before, *choice.logprobs]
            logprobs = completion_logprobs(ids, entries, 0, self._service.prompts.texts)
        return {
            "index": index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _piece(self, index: int, delta: Piece, offset: int) -> dict[str, Any]:
        logprobs = None
        if delta.logprobs is not None:
            texts = self._service.prompts.texts
            logprobs = completion_logprobs(delta.token_ids, delta.logprobs, offset, texts)
        return {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": reason_of(delta),
        }


async def collect(
    messages: AsyncGenerator[Piece | Ended], params: SamplingParams
) -> tuple[list[Choice], Ended]:
    """All results of one prompt, and how it ended."""
    choices = [Choice() for _ in range(params.n)]
    ended: Ended | None = None
    async for message in messages:
        if isinstance(message, Ended):
            ended = message
        else:
            choices[message.index].take(message)
    assert ended is not None, "a stream ends with its end"
    return choices, ended
