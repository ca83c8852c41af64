"""`POST /v1/chat/completions`; its body is `ChatBody` in kvq.server.admission.bodies."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvq.engine.requests.outputs import Piece
from kvq.server.admission.bodies import ChatBody, plain_text
from kvq.server.admission.service import Service
from kvq.server.openai.answers import Answer, reason_of
from kvq.server.openai.sampling import chat_params
from kvq.server.tools.calling import Offer, ToolCalling
from kvq.server.tools.format import Tool
from kvq.server.tools.parser import Event, Parser
from kvq.server.tools.thoughts import Thoughts


class Chat(Answer):
    OBJECT, CHUNK, ID = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, service: Service, body: ChatBody, tenant: str) -> None:
        """Raise Problem if the body requests something that this server does not support."""
        service.check_model(body.model, body.kv_format)
        params = chat_params(body, service.defaults)
        self._offer = _offer(body, service.tools)
        self._body = body
        self._readings: dict[int, _Reading] = {}  # keyed by the result's index
        self._is_open: bool | None = False  # whether results begin with thinking
        super().__init__(service, body, params if self._offer is None else self._offer.params(params), tenant)

    async def _read(self) -> list[Sequence[int]]:
        body = self._body
        shown = body.tools if body.tool_choice != "none" else None  # otherwise calls would be text
        tools = [tool.model_dump(exclude_none=True) for tool in shown or ()]
        effort = body.reasoning_effort and {"reasoning_effort": body.reasoning_effort}
        options = {**(effort or {}), **(body.chat_template_kwargs or {}), "tools": tools or None}
        options["add_generation_prompt"] = body.add_generation_prompt and not body.continue_final_message
        if body.continue_final_message:
            options["continue_final_message"] = True
        prompts, tenant = self._service.prompts, self._request.tenant
        tokens, texts = await prompts.read_chat((body.messages, options), tenant=tenant)
        begun = plain_text(body.messages[-1]) if body.continue_final_message else None
        self._is_open, params = self._service.thinks(self._request.params, tokens, begun)
        self._request = replace(self._request, params=params, texts=texts)
        return [tokens]

    def _choice(self, index: int, whole: Piece) -> dict[str, Any]:
        reading = self._readings[index] = self._reading()
        message = reading.message(whole)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(whole),
            "finish_reason": reading.reason(whole),
        }

    def _delta(self, index: int, piece: Piece) -> dict[str, Any] | None:
        reading = self._readings.get(index)
        if reading is None:
            reading = self._readings[index] = self._reading()
            delta = {"role": "assistant", "content": None} | reading.delta(piece)
        else:
            delta = reading.delta(piece)
        logprobs = self._logprobs(piece)
        reason = reading.reason(piece)
        if not (delta or logprobs or reason):
            return None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if piece.logprobs is None or not self.is_heavy:
            return None
        return self._service.prompts.texts.chat_logprobs(piece.logprobs)

    def _reading(self) -> "_Reading":
        thoughts = Thoughts(self._service.tools.thinking, self._is_open)
        return _Reading(None if self._offer is None else self._offer.parser(), thoughts)

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if self._service.tools.thinking is not None:
            count = sum(reading.thoughts.num_tokens for reading in self._readings.values())
            usage.setdefault("completion_tokens_details", {})["reasoning_tokens"] = count
        return usage


class _Reading:
    """Incremental parser of one result: splits its text into thinking, content and tool calls."""

    def __init__(self, parser: Parser | None, thoughts: Thoughts) -> None:
        """If `parser` is None, all text except thinking is content."""
        self._parser = parser
        self.thoughts = thoughts

    def message(self, whole: Piece) -> dict[str, Any]:
        added = self.delta(whole)
        message = {"role": "assistant", "refusal": None, "content": ""} | added
        if calls := added.get("tool_calls"):
            message["content"] = message["content"] or None
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        return message

    def delta(self, delta: Piece) -> dict[str, Any]:
        """Return the delta that one step adds to a message; it may be empty."""
        is_last = delta.finish_reason is not None
        thought, text = self.thoughts.feed(delta.text, delta.token_ids, is_last=is_last)
        added: dict[str, Any] = {"reasoning_content": thought} if thought else {}
        if self._parser is None:
            return added | ({"content": text} if text or not delta.text else {})
        events = self._parser.feed(text)
        if is_last:
            events += self._parser.close()
        if content := "".join(event.text for event in events if event.call is None):
            added["content"] = content
        if calls := _call_deltas(events):
            added["tool_calls"] = calls
        return added

    def reason(self, piece: Piece) -> str | None:
        """Return the `finish_reason` in OpenAI's terms; call this after `delta` for the same piece."""
        reason = reason_of(piece)
        has_calls = self._parser is not None and self._parser.num_calls
        return "tool_calls" if has_calls and reason == "stop" else reason


def _offer(body: ChatBody, calling: ToolCalling) -> Offer | None:
    functions = [tool.function for tool in body.tools or ()]
    choice = body.tool_choice or "auto"
    return calling.offer(
        [Tool(name=function.name, parameters=function.parameters or {}) for function in functions],
        choice=choice if isinstance(choice, str) else Tool(name=choice.function.name),
        parallel=body.parallel_tool_calls,
        is_formatted=body.response_format is not None and body.response_format.type != "text",
    )


def _call_deltas(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return one delta for each call with new events; clients read only one delta per index in a chunk."""
    deltas: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.call is None:
            continue
        if event.name is not None:
            begun = {"index": event.call, "id": event.id, "type": "function"}
            deltas[event.call] = begun | {"function": {"name": event.name, "arguments": ""}}
        else:
            delta = deltas.setdefault(event.call, {"index": event.call, "function": {"arguments": ""}})
            delta["function"]["arguments"] += event.text
    return list(deltas.values())
