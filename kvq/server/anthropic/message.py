"""`POST /v1/messages`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from kvq.engine import SamplingParams, StructuredOutput
from kvq.engine.intake import Origin, Terms
from kvq.engine.outputs import Piece, PromptUse
from kvq.server.anthropic.bodies import MessagesBody
from kvq.server.anthropic.content import Content, Event
from kvq.server.anthropic.offer import offer_of
from kvq.server.anthropic.prompt import prompt_pins, prompt_tokens
from kvq.server.messages import Ended
from kvq.server.sampling import engine_refusals, same_fields, schema_text
from kvq.server.seating import Seats
from kvq.server.service import Service
from kvq.server.tools.calling import Offer


class MessageCall:
    """One request. The whole answer is what the events of the streamed one add up to."""

    def __init__(self, service: Service, body: MessagesBody, tenant: str) -> None:
        """Raises Problem: something in it that this server does not do."""
        service.check_model(body.model)
        offer = offer_of(body, service.tools)
        self._params = _params(body, offer)
        self._service = service
        self._body = body
        self._tenant = tenant
        self._id = f"msg_{uuid4().hex[:24]}"
        self._content = Content(None if offer is None else offer.parser())
        self._last: Piece | None = None
        self._usage: dict[str, int] = {}
        self.seats = Seats()

    is_heavy = False

    async def answer(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            Problem: it can't be served, or failed.
        """
        async for _ in self.chunks():
            pass
        return self._message(self._content.blocks, self._ending(), self._usage)

    async def chunks(self) -> AsyncGenerator[Event]:
        """The answer's events, as they come.

        Raises:
            Problem: it can't be served, or failed on the way.
        """
        async with aclosing(await self._stream()) as messages:
            async for message in messages:
                if isinstance(message, Ended):
                    continue
                if message.prompt is not None:
                    self._usage = _usage(message.prompt)
                    unknown = {"stop_reason": None, "stop_sequence": None}
                    yield {"type": "message_start", "message": self._message([], unknown, self._usage)}
                self._last = message
                self._usage["output_tokens"] += len(message.token_ids)
                for told in self._content.feed(message.text):
                    yield told
        for told in self._content.close():
            yield told
        yield {"type": "message_delta", "delta": self._ending(), "usage": self._usage}
        yield {"type": "message_stop"}

    async def _stream(self) -> AsyncGenerator[Piece | Ended]:
        prompts = self._service.prompts
        tokens = await prompt_tokens(prompts, self._body, self._tenant)
        pins = await prompt_pins(prompts, self._body, tokens, self._tenant)
        origin = Origin(tenant=self._tenant, cache_salt=self._body.cache_salt)
        return self._service.stream(tokens, Terms(params=self._params, origin=origin, pins=pins), self.seats)

    def _ending(self) -> dict[str, Any]:
        last = self._last
        if last is not None and last.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if last is not None and isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        return {"stop_reason": "tool_use" if self._content.has_calls else "end_turn", "stop_sequence": None}

    def _message(
        self, content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, int]
    ) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._service.name}
        return head | {"content": content} | ending | {"usage": usage | {"service_tier": "standard"}}


def _params(body: MessagesBody, offer: Offer | None) -> SamplingParams:
    format = None if body.output_config is None else body.output_config.format
    schema = None if format is None else schema_text(format.definition)
    with engine_refusals():
        others = {
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "top_k": body.top_k or None,  # 0 keeps all
            "stop": body.stop_sequences,
            "structured": None if schema is None else StructuredOutput(json_schema=schema),
        }
        params = SamplingParams(**same_fields(body) | others)
        return params if offer is None else offer.params(params)


def _usage(prompt: PromptUse) -> dict[str, int]:
    """Cached tokens were read, pinned ones beyond them written; the three add up to the prompt."""
    written = max(0, prompt.pinned - prompt.cached)
    return {
        "input_tokens": prompt.total - prompt.cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": prompt.cached,
        "output_tokens": 0,
    }
