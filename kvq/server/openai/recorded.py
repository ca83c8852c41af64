"""Recorded responses: whole, or put together from the chunks of OpenAI's or Anthropic's streams."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from kvq.server.http.ignored import Body
from kvq.server.openai.respond import Call
from kvq.server.recording import Recorder
from kvq.server.tools.format import arguments_of

_LEFT_OUT = {"cache_salt", "metadata", "stream", "stream_options", "previous_response_id", "store"}


def recorded(call: Call, body: Body, recorder: Recorder | None) -> Call:
    """Return the call, recorded if there is a recorder."""
    return call if recorder is None else _Recorded(call, body, recorder)


class _Recorded(Call):
    def __init__(self, call: Call, body: Body, recorder: Recorder) -> None:
        self.slots, self.is_heavy = call.slots, call.is_heavy
        self._call, self._recorder = call, recorder
        self._request = partial(body.model_dump, by_alias=True, exclude_unset=True, exclude=_LEFT_OUT)

    async def answer(self) -> dict[str, Any]:
        whole = await self._call.answer()
        self._recorder.put(self._request, _without_logprobs(whole))
        return whole

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        whole = _Whole()
        async with aclosing(self._call.chunks()) as chunks:
            async for chunk in chunks:
                whole.add(chunk)
                yield chunk
        if (response := whole.response()) is not None:
            self._recorder.put(self._request, _without_logprobs(response))


class _Whole:
    """Response that the chunks of a stream add up to."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}  # keyed by the result's index
        self._blocks: list[dict[str, Any]] = []  # of Anthropic's protocol

    def add(self, chunk: dict[str, Any]) -> None:
        """Add a chunk of a chat, or an event of a response or of Anthropic's protocol."""
        if "choices" not in chunk:
            self._add_event(chunk)
            return
        self._head = chunk
        for given in chunk["choices"]:
            begun = {"index": given["index"], "message": {"role": "assistant", "content": ""}}
            choice, delta = self._choices.setdefault(given["index"], begun), given["delta"]
            choice["finish_reason"] = given["finish_reason"]
            _extend(choice["message"], {key: delta.get(key) for key in ("content", "reasoning_content")})
            for call in delta.get("tool_calls", ()):
                calls = choice["message"].setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    function = {"name": call["function"]["name"], "arguments": ""}
                    calls.append({"id": call["id"], "type": "function", "function": function})
                _extend(calls[call["index"]]["function"], {"arguments": call["function"]["arguments"]})

    def _add_event(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "message_start":
                self._head = event["message"]
            case "content_block_start":
                self._blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                _extend(self._blocks[-1], {k: text for k, text in event["delta"].items() if k != "type"})
            case "content_block_stop" if "partial_json" in self._blocks[-1]:
                self._blocks[-1]["input"] = arguments_of(self._blocks[-1].pop("partial_json"))
            case "response.completed" | "response.incomplete":
                self._head = event["response"]
            case "message_delta":
                self._head = self._head | event["delta"] | {"usage": event["usage"]}

    def response(self) -> dict[str, Any] | None:
        """Return the response as it would be if it were not streamed, or None if it failed."""
        if "output" in self._head:
            return self._head
        if "choices" not in self._head:
            return self._head | {"content": self._blocks} if self._head else None
        choices = [choice for _, choice in sorted(self._choices.items())]
        return self._head | {"object": "chat.completion", "choices": choices}


def _extend(texts: dict[str, Any], more: dict[str, str | None]) -> None:
    for key, text in more.items():
        if text:
            texts[key] = texts.get(key, "") + text


def _without_logprobs(whole: dict[str, Any]) -> dict[str, Any]:
    """Return a response without the tokens of its texts, in which nothing is redacted."""
    if "output" in whole:  # of the Responses API
        return whole | {"output": [_bare(item) for item in whole["output"]]}
    if "choices" not in whole:
        return whole
    return whole | {"choices": [{**choice, "logprobs": None} for choice in whole["choices"]]}


def _bare(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "message":
        return item
    return item | {"content": [{**part, "logprobs": []} for part in item["content"]]}
