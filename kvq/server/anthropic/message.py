"""`POST /v1/messages`: the content blocks of a response, the events that stream them, and the routes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.responses import Response

from kvq.engine import SamplingParams, StructuredOutput
from kvq.engine.requests.defaults import SamplingDefaults
from kvq.engine.requests.outputs import Piece, PromptUse
from kvq.engine.requests.request_options import RequestOptions
from kvq.server.admission.service import Service
from kvq.server.admission.slots import SequenceSlots
from kvq.server.anthropic.bodies import MessagesBody, PromptBody
from kvq.server.anthropic.prompt import conversation, prompt_pins, text_of
from kvq.server.engine.messages import Ended
from kvq.server.http.problems import MESSAGES_PATH, Problem
from kvq.server.openai.openapi import answer, stream_or
from kvq.server.openai.recorded import recorded
from kvq.server.openai.respond import Call, note_fields, respond, tenant_of, text_request
from kvq.server.openai.sampling import params_of, schema_text
from kvq.server.tools.calling import Offer, ToolCalling, ToolChoice
from kvq.server.tools.format import Tool, arguments_of
from kvq.server.tools.parser import Event as Found
from kvq.server.tools.parser import Parser
from kvq.server.tools.thoughts import Thoughts

COUNT_TOKENS_PATH = f"{MESSAGES_PATH}/count_tokens"
Event = dict[str, Any]

_CHOICES: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes for messages and for counting their input tokens."""

    @app.post(MESSAGES_PATH, responses=stream_or("MessageAnswer"))
    async def messages(request: Request, body: MessagesBody) -> Response:
        await note_fields(request, service, body)
        call = recorded(_MessageCall(service, body, tenant_of(request)), body, service.recorder)
        return await respond(request, service, call, stream=body.stream)

    @app.post(COUNT_TOKENS_PATH, responses=answer("InputTokens"))
    async def count_tokens(request: Request, body: PromptBody) -> dict[str, Any]:
        async with text_request(request, service, body, body.model) as prompts:
            tokens = await prompts.chat(conversation(body), tenant=tenant_of(request))
        return {"input_tokens": len(tokens)}


class _MessageCall(Call):
    """Messages request. A complete response is assembled from the events of a stream."""

    def __init__(self, service: Service, body: MessagesBody, tenant: str) -> None:
        """Raise Problem if the body requests something that this server does not support."""
        service.check_model(body.model, body.kv_format)
        if body.thinking is not None and body.thinking.type != "disabled" and not service.tools.thinking:
            raise Problem(400, "this model does not think; leave thinking out", param="thinking")
        offer = _offer(body, service.tools)
        self._params = _params(body, offer, service.defaults)
        self._service = service
        self._body = body
        self._tenant = tenant
        self._adapter = service.adapter_of(body.model)
        self._id = f"msg_{uuid4().hex[:24]}"
        self._offer = offer
        self._last: Piece | None = None
        self._usage: dict[str, int] = {}
        self.slots = SequenceSlots()

    async def answer(self) -> dict[str, Any]:
        async for _ in self.chunks():
            pass
        return self._message(self._content.blocks, self._ending(), self._usage)

    async def chunks(self) -> AsyncGenerator[Event]:
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
                for event in self._content.feed(message.text, is_last=message.finish_reason is not None):
                    yield event
        for event in self._content.close():
            yield event
        yield {"type": "message_delta", "delta": self._ending(), "usage": self._usage}
        yield {"type": "message_stop"}

    async def _stream(self) -> AsyncGenerator[Piece | Ended]:
        prompts = self._service.prompts
        tokens, texts = await prompts.read_chat(conversation(self._body), tenant=self._tenant)
        pins = await prompt_pins(prompts, self._body, tokens, self._tenant)
        last = self._body.messages[-1]
        begun = None if last.role == "user" else text_of(last.content)
        is_open, params = self._service.thinks(self._params, tokens, begun)
        parser = None if self._offer is None else self._offer.parser()
        self._content = _Content(parser, Thoughts(self._service.tools.thinking, is_open))
        options = RequestOptions(
            params=params,
            pins=pins,
            tenant=self._tenant,
            adapter=self._adapter,
            cache_salt=self._body.cache_salt,
            session=self._body.session_id,
            retain_s=self._body.kv_retain,
            kv_format=self._body.kv_format,
            texts=texts,
        )
        return self._service.stream(tokens, options, self.slots)

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
        head = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._adapter or self._service.name,
        }
        return head | {"content": content} | ending | {"usage": usage | {"service_tier": "standard"}}


class _Content:
    """Content blocks of a response during generation."""

    def __init__(self, parser: Parser | None, thoughts: Thoughts) -> None:
        """If `parser` is None, everything except thinking is text."""
        self.blocks: list[dict[str, Any]] = []
        self._parser = parser
        self._thoughts = thoughts
        self._arguments: list[str] = []  # arguments of the last block, if it is a call
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def feed(self, text: str, *, is_last: bool = False) -> list[Event]:
        """Add text to the response, and return the resulting events."""
        thought, rest = self._thoughts.feed(text, is_last=is_last)
        found = [Found(rest)] if self._parser is None else self._parser.feed(rest)
        events = self._add("thinking", thought)
        return [*events, *(event for one in found for event in self._take(one))]

    def close(self) -> list[Event]:
        """End the response, and return the last events."""
        found = [] if self._parser is None else self._parser.close()
        return [*(event for one in found for event in self._take(one)), *self._stop()]

    def _take(self, found: Found) -> list[Event]:
        if found.name is not None:
            return self._start({"type": "tool_use", "id": found.id, "name": found.name, "input": {}})
        if found.call is not None:
            self._arguments.append(found.text)
            return [self._delta({"type": "input_json_delta", "partial_json": found.text})]
        return self._add("text", found.text)

    def _add(self, kind: str, text: str) -> list[Event]:
        """Append text to the current block, or start a new block if its kind differs."""
        if not text:
            return []
        is_same = self._is_open and self.blocks[-1]["type"] == kind
        signed = {"signature": ""} if kind == "thinking" else {}
        started = [] if is_same else self._start({"type": kind, kind: ""} | signed)
        self.blocks[-1][kind] += text
        return [*started, self._delta({"type": f"{kind}_delta", kind: text})]

    def _start(self, block: dict[str, Any]) -> list[Event]:
        stopped = self._stop()
        self.blocks.append(block)
        self._is_open = True
        at = len(self.blocks) - 1
        return [*stopped, {"type": "content_block_start", "index": at, "content_block": dict(block)}]

    def _stop(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        if self.blocks[-1]["type"] == "tool_use":
            self.blocks[-1]["input"] = arguments_of("".join(self._arguments))
            self._arguments.clear()
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _offer(body: MessagesBody, calling: ToolCalling) -> Offer | None:
    choice = body.tool_choice
    return calling.offer(
        [Tool(name=tool.name, parameters=tool.parameters) for tool in body.tools],
        choice=_CHOICES[choice.type] if choice.name is None else Tool(name=choice.name),
        parallel=not choice.disable_parallel_tool_use,
        is_formatted=body.output_config is not None and body.output_config.format is not None,
    )


def _params(body: MessagesBody, offer: Offer | None, defaults: SamplingDefaults) -> SamplingParams:
    format = None if body.output_config is None else body.output_config.format
    schema = None if format is None else schema_text(format.definition)
    others = {
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_k": body.top_k or None,  # 0: no limit
        "stop": body.stop_sequences,
        "structured": None if schema is None else StructuredOutput(json_schema=schema),
    }
    params = params_of(body, others, defaults)
    return params if offer is None else offer.params(params)


def _usage(prompt: PromptUse) -> dict[str, int]:
    """Return a prompt's usage: cached tokens count as read, and pinned tokens beyond those as written."""
    written = max(0, prompt.pinned - prompt.cached)
    return {
        "input_tokens": prompt.total - prompt.cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": prompt.cached,
        "output_tokens": 0,
    }
