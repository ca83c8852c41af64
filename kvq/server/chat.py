"""`POST /v1/chat/completions`."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from kvq.engine.outputs import Piece
from kvq.errors import RequestError
from kvq.server.answers import Choice, Head, Usage, chat_logprobs, reason_of
from kvq.server.bodies import ChatBody
from kvq.server.chat_tools import Reading, offer_of, template_tools
from kvq.server.completions import collect
from kvq.server.messages import Ended
from kvq.server.problems import Problem
from kvq.server.prompts import Conversation
from kvq.server.sampling import chat_params, terms_of
from kvq.server.seating import Seats
from kvq.server.service import Service


class Chat:
    """One request."""

    def __init__(self, service: Service, body: ChatBody, tenant: str) -> None:
        """Raises Problem: something in it that this server does not do."""
        service.check_model(body.model)
        params = chat_params(body)
        self._offer = offer_of(body, service.tools)
        if self._offer is not None:
            try:
                params = self._offer.params(params)
            except RequestError as error:
                raise Problem(400, str(error), param="tool_choice") from error
        self._service = service
        self._body = body
        self._terms = terms_of(body, params, tenant)
        self._head = Head.new("chatcmpl", service.name)
        self.seats = Seats(sequences=params.num_sequences)

    @property
    def is_heavy(self) -> bool:
        """With log-probabilities."""
        return self._body.logprobs

    async def answer(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            Problem: it can't be served, or failed.
        """
        choices, ended = await collect(await self._stream(), self._terms.params)
        usage = Usage()
        usage.take(ended)
        done = await asyncio.to_thread(self._choices, choices) if self.is_heavy else self._choices(choices)
        return self._head.body("chat.completion") | {"choices": done, "usage": usage.body()}

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The answer in pieces, as they come.

        Raises:
            Problem: it can't be served, or failed on the way.
        """
        usage = Usage()
        readings: dict[int, Reading] = {}  # by the result's index
        async with aclosing(await self._stream()) as messages:
            async for message in messages:
                if isinstance(message, Ended):
                    usage.take(message)
                    continue
                first: dict[str, Any] = {}
                if message.index not in readings:
                    readings[message.index] = self._reading()
                    first = {"role": "assistant", "content": None}
                piece = self._piece(message, first, readings[message.index])
                if piece["delta"] or piece["logprobs"] or piece["finish_reason"]:
                    yield self._chunk([piece])
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield self._chunk([]) | {"usage": usage.body()}

    async def _stream(self) -> AsyncGenerator[Piece | Ended]:
        body = self._body
        options = (body.chat_template_kwargs or {}) | {"tools": template_tools(body)}
        options["add_generation_prompt"] = body.add_generation_prompt and not body.continue_final_message
        if body.continue_final_message:
            options["continue_final_message"] = True
        conversation = Conversation(messages=body.messages, options=options)
        tokens = await self._service.prompts.chat(conversation, tenant=self._terms.origin.tenant)
        return self._service.stream(tokens, self._terms, self.seats)

    def _reading(self) -> Reading:
        return Reading(None if self._offer is None else self._offer.parser())

    def _choices(self, choices: list[Choice]) -> list[dict[str, Any]]:
        return [self._choice(i, choice) for i, choice in enumerate(choices)]

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = (
            chat_logprobs(choice.logprobs, self._service.prompts.texts) if self._body.logprobs else None
        )
        reading = self._reading()
        message = reading.message(choice.text)
        return {
            "index": index,
            "message": {"role": "assistant", "refusal": None} | message,
            "logprobs": logprobs,
            "finish_reason": reading.reason(choice.finish_reason),
        }

    def _piece(self, delta: Piece, first: dict[str, Any], reading: Reading) -> dict[str, Any]:
        logprobs = None
        if delta.logprobs is not None:
            logprobs = chat_logprobs(delta.logprobs, self._service.prompts.texts)
        added = reading.delta(delta)
        return {
            "index": delta.index,
            "delta": first | added,
            "logprobs": logprobs,
            "finish_reason": reading.reason(reason_of(delta)),
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head.body("chat.completion.chunk") | {"choices": choices}
