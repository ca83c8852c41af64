"""`/v1/responses`: output items of a response, the events that stream them, and the routes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from time import time
from typing import Annotated, Any, Literal
from uuid import uuid4

import msgspec
from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from kvq.server.admission.service import Service
from kvq.server.http.problems import RESPONSES_PATH, Problem
from kvq.server.openai.chat import Chat
from kvq.server.openai.openapi import answer, stream_or
from kvq.server.openai.recorded import recorded
from kvq.server.openai.respond import Call, note_fields, respond, tenant_of
from kvq.server.responses.bodies import ITEM, ResponsesBody
from kvq.server.responses.conversation import chat_body
from kvq.server.responses.kept import Entry, Kept

Event = dict[str, Any]
_ECHOED = {
    *("instructions", "previous_response_id", "store", "tools", "tool_choice", "parallel_tool_calls"),
    *("max_output_tokens", "temperature", "top_p", "top_logprobs", "text", "reasoning", "truncation"),
    *("metadata", "user"),
}
_UNKNOWN = dict.fromkeys((*_ECHOED, "error", "incomplete_details", "usage"))  # null until there is a value
_PARTS: dict[str, dict[str, Any]] = {  # the only part of an item with text
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}
_HEADS: dict[str, tuple[str, dict[str, Any]]] = {  # prefixes of ids, and fields of new items
    "message": ("msg", {"role": "assistant", "content": []}),
    "reasoning": ("rs", {"summary": [], "content": []}),
    "function_call": ("fc", {"arguments": ""}),
}


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes that create, return and delete responses."""
    kept = Kept(*service.most_stored)

    @app.post(RESPONSES_PATH, responses=stream_or("ResponseAnswer"))
    async def create(request: Request, body: ResponsesBody) -> Response:
        await note_fields(request, service, body)
        tenant, before, new = tenant_of(request), list[bytes](), body.input
        if isinstance(new, str):
            new = [ITEM.validate_python({"type": "message", "role": "user", "content": new})]
        body.input = new = [kept.resolved(tenant, item) for item in new]
        if (previous := body.previous_response_id) is not None:
            before = kept.find(tenant, previous, "previous_response_id").items
            earlier = await asyncio.to_thread(lambda: [*map(ITEM.validate_json, before)])
            body.input = [*earlier, *new]  # recorded as if all had been sent

        def keep(response: dict[str, Any]) -> None:
            if body.store:
                items = before + [item.model_dump_json(exclude_none=True).encode() for item in new]
                output = {item["id"]: msgspec.json.encode(item) for item in response["output"]}
                items += output.values()
                kept.put(tenant, response["id"], Entry(items, msgspec.json.encode(response), output))

        call = _ResponseCall(service, body, Chat(service, chat_body(body), tenant), keep)
        return await respond(request, service, recorded(call, body, service.recorder), stream=body.stream)

    @app.get(f"{RESPONSES_PATH}/{{response_id}}", responses=answer("ResponseAnswer"))
    async def find(request: Request, response_id: str, stream: bool = False) -> Response:
        if stream:
            words = "a stored response is complete, so it is not streamed again; leave stream out"
            raise Problem(400, words, param="stream")
        entry = kept.find(tenant_of(request), response_id)
        return Response(entry.response, media_type="application/json")

    @app.get(f"{RESPONSES_PATH}/{{response_id}}/input_items", responses=answer("InputItems"))
    async def input_items(
        request: Request,
        response_id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        items = kept.find(tenant_of(request), response_id).input_items(response_id)
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise Problem(400, f"the response has no input item {after!r:.100}", param="after")
        start = 0 if after is None else ids.index(after) + 1
        end = min(start + limit, len(ids))
        first, last = (ids[start], ids[end - 1]) if start < end else (None, None)
        page = {"first_id": first, "last_id": last, "has_more": end < len(ids)}
        return {"object": "list", "data": items[start:end]} | page

    @app.delete(f"{RESPONSES_PATH}/{{response_id}}", responses={200: {"model": dict[str, Any]}})
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        kept.drop(tenant_of(request), response_id)
        return {"id": response_id, "object": "response", "deleted": True}


class _ResponseCall(Call):
    """Responses request. A complete response is assembled from the events of a stream."""

    def __init__(
        self, service: Service, body: ResponsesBody, chat: Chat, keep: Callable[[Event], object]
    ) -> None:
        given = body.model_dump(include=_ECHOED, exclude_none=True, by_alias=True)
        head = {"id": f"resp_{uuid4().hex}", "object": "response", "created_at": int(time()), "output": []}
        head |= {
            "model": service.adapter_of(body.model) or service.name,
            "status": "in_progress",
            "background": False,
        }
        own = _ECHOED & service.defaults.fields.keys() - body.model_fields_set
        self._response: Event = head | _UNKNOWN | given | {k: service.defaults.fields[k] for k in own}
        self._output = _Output()
        self._chat, self._keep = chat, keep
        self.slots, self.is_heavy = chat.slots, chat.is_heavy

    async def answer(self) -> dict[str, Any]:
        async for _ in self._events():
            pass
        return self._response

    async def chunks(self) -> AsyncGenerator[Event]:
        number = 0
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    yield event | {"sequence_number": number}
                    number += 1
        except Problem as problem:
            if not number:
                raise
            error = {"code": "server_error", "message": problem.message}
            done = [item for item in self._output.items if item["status"] == "completed"]
            failed = self._response | {"status": "failed", "output": done, "error": error}
            yield {"type": "response.failed", "response": failed, "sequence_number": number}

    async def _events(self) -> AsyncGenerator[Event]:
        chunk, reason, output = dict[str, Any](), None, self._output
        async with aclosing(self._chat.chunks()) as chunks:
            async for chunk in chunks:
                if reason is None:
                    yield {"type": "response.created", "response": self._response}
                    yield {"type": "response.in_progress", "response": self._response}
                for choice in chunk["choices"]:
                    reason = choice["finish_reason"] or ""
                    for event in output.feed(choice["delta"], choice["logprobs"]):
                        yield event
        is_cut = reason == "length"
        status, why = ("incomplete", {"reason": "max_output_tokens"}) if is_cut else ("completed", None)
        for event in output.close(status):
            yield event
        ending = {"status": status, "incomplete_details": why, "completed_at": int(time())}
        self._response = self._response | ending | {"output": output.items, "usage": _usage(chunk["usage"])}
        self._keep(self._response)
        yield {"type": f"response.{status}", "response": self._response}


def _usage(of_chat: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's usage under the names of the Responses API."""
    return {name: of_chat[name] for name in ("exact_receipts",) if name in of_chat} | {
        "input_tokens": of_chat["prompt_tokens"],
        "input_tokens_details": {"cache_write_tokens": 0} | of_chat["prompt_tokens_details"],
        "output_tokens": of_chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0} | of_chat.get("completion_tokens_details", {}),
        "total_tokens": of_chat["total_tokens"],
    }


class _Output:
    """Output items so far; a new item begins where text, thinking and calls alternate."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._texts: list[str] | None = None  # of the last item while it is open
        self._waiting: list[Any] = []  # log-probabilities of tokens whose text is yet to come
        self._logprobs: list[Any] = []  # of the last item

    def feed(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> Iterator[Event]:
        """Add a chat's delta and the log-probabilities of its tokens, and yield the resulting events.

        Arguments without an id continue the last item, so they come before text that follows the call. Only
        messages have log-probabilities.
        """
        calls = delta.get("tool_calls", ())
        self._waiting += [] if logprobs is None else logprobs["content"]
        if (calls or delta.get("reasoning_content")) and not delta.get("content"):
            self._waiting.clear()
        yield from self._write("reasoning", delta.get("reasoning_content"))
        for call in calls:
            if "id" not in call:
                yield self._grow(call["function"]["arguments"])
        yield from self._write("message", delta.get("content"))
        for call in calls:
            if "id" in call:
                function = call["function"]
                yield from self._start("function_call", call_id=call["id"], name=function["name"])
                if function["arguments"]:
                    yield self._grow(function["arguments"])

    def close(self, status: str = "completed") -> Iterator[Event]:
        """End the open item, if there is one, with this status."""
        if self._texts is None:
            return
        item, text = self.items[-1], "".join(self._texts)
        kind, self._texts = item["type"], None
        if (empty := _PARTS.get(kind)) is None:
            item["arguments"] = text
            yield self._event("function_call_arguments.done", {"name": item["name"], "arguments": text})
        else:
            part = empty | {"text": text}
            if kind == "message":
                self._logprobs += self._waiting
                part["logprobs"], self._waiting = self._logprobs, []
            item["content"] = [part]
            yield self._event(f"{part['type']}.done", {"text": text}, self._logprobs)
            yield self._event("content_part.done", {"part": part})
        item["status"] = status
        yield self._event("output_item.done", {"item": dict(item)})

    def _write(self, kind: str, text: str | None) -> Iterator[Event]:
        """Append text to the open item, or to a new one if its kind differs."""
        if text:
            if self._texts is None or self.items[-1]["type"] != kind:
                yield from self._start(kind)
                yield self._event("content_part.added", {"part": _PARTS[kind]})
            yield self._grow(text)

    def _start(self, kind: str, **own: str) -> Iterator[Event]:
        yield from self.close()
        prefix, fields = _HEADS[kind]
        head = {"id": f"{prefix}_{uuid4().hex}", "type": kind, "status": "in_progress"}
        self.items.append(head | fields | own)
        self._texts, self._logprobs = [], []
        yield self._event("output_item.added", {"item": dict(self.items[-1])})

    def _grow(self, text: str) -> Event:
        assert self._texts is not None, "arguments follow the start of their call"
        self._texts.append(text)
        part, new = _PARTS.get(self.items[-1]["type"], {"type": "function_call_arguments"}), list[Any]()
        if self.items[-1]["type"] == "message":
            new, self._waiting = self._waiting, new
            self._logprobs += new
        return self._event(f"{part['type']}.delta", {"delta": text}, new)

    def _event(self, what: str, fields: Event, logprobs: Sequence[Any] = ()) -> Event:
        """Return an event of the last item. `logprobs`: of the tokens of its text."""
        if "item" not in fields:
            fields["item_id"] = self.items[-1]["id"]
            fields |= {"content_index": 0} if self.items[-1]["type"] in _PARTS else {}
        if what.startswith("output_text"):
            fields["logprobs"] = list(logprobs)
        return {"type": f"response.{what}", "output_index": len(self.items) - 1} | fields
