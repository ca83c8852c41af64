"""Ollama's routes, and their answers, which are made from the streams of OpenAI's protocol."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from time import perf_counter_ns
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from kvq.server.admission.bodies import ChatBody, CompletionBody, Count, CountOrZero
from kvq.server.admission.service import Service
from kvq.server.http.problems import Problem
from kvq.server.ollama.bodies import GenerateBody, OllamaBody, OllamaChatBody
from kvq.server.openai.chat import Chat
from kvq.server.openai.completions import Completions
from kvq.server.openai.openapi import Responses, stream_or
from kvq.server.openai.respond import Call, note_fields, respond, tenant_of, text_request
from kvq.server.tools.format import arguments_of
from kvq.version import __version__

GENERATING = ("/api/generate", "/api/chat")
READING = ("/api/show",)
_ANSWER = stream_or("OllamaAnswer", "application/x-ndjson")
_OBJECT: Responses = {200: {"model": dict[str, Any]}}


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes for generation and for descriptions of the model."""

    @app.post("/api/generate", responses=_ANSWER)
    async def generate(request: Request, body: GenerateBody) -> Response:
        return await _respond(request, service, body)

    @app.post("/api/chat", responses=_ANSWER)
    async def chat(request: Request, body: OllamaChatBody) -> Response:
        return await _respond(request, service, body)

    @app.get("/api/tags", responses=_OBJECT)
    @app.get("/api/ps", responses=_OBJECT)
    async def models() -> dict[str, Any]:
        return {"models": [_model(service, name) for name in service.models]}

    @app.post("/api/show", responses=_OBJECT)
    async def show(request: Request, body: OllamaBody) -> dict[str, Any]:
        async with text_request(request, service, body, _known(service, body.model)):
            return _model(service, body.model)

    @app.get("/api/version", responses=_OBJECT)
    async def version() -> dict[str, Any]:
        return {"version": __version__}


async def _respond(request: Request, service: Service, body: GenerateBody | OllamaChatBody) -> Response:
    if not (body.prompt if isinstance(body, GenerateBody) else body.messages):
        async with text_request(request, service, body, _known(service, body.model)):
            service.check_ready()  # all that a request to load the model can ask of a server
            return JSONResponse(_answer_object(body) | {"done": True, "done_reason": "load"})
    await note_fields(request, service, body)
    service.check_model(_known(service, body.model))
    return await respond(request, service, _OllamaCall(service, body, tenant_of(request)), stream=body.stream)


def _known(service: Service, name: str) -> str:
    """Return a model's name without the tag that Ollama's clients add."""
    return name if name in service.models else name.removesuffix(":latest")


def _model(service: Service, name: str) -> dict[str, Any]:
    info, tools = service.remote.info, service.tools
    can = {"completion": True, "tools": tools.format, "thinking": tools.thinking}
    found = {"name": name, "model": name, "modified_at": _SINCE, "details": {}, "model_info": {}}
    if info is not None:
        sizes = {"general.architecture": "kvq", "kvq.context_length": info.max_context}
        found |= {"digest": info.model_digest, "model_info": sizes}
    return found | {"capabilities": [what for what in can if can[what]]}


_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # D382: Ollama's, where the model has none


class _ChatBody(ChatBody):
    most_tokens: Count | None = None


class _CompletionBody(CompletionBody):
    max_tokens: CountOrZero | None = None
    most_tokens: Count | None = None


class _OllamaCall(Call):  # D383
    """Generation request, answered with what a request of OpenAI's protocol generates."""

    def __init__(self, service: Service, body: GenerateBody | OllamaChatBody, tenant: str) -> None:
        """Raise Problem if the body requests something that this server does not support."""
        self._source = _source(service, body, tenant)
        self._body = body
        self._calls: list[dict[str, Any]] = []
        self._choice: dict[str, Any] = {}  # the latest
        self._usage: dict[str, Any] = {}
        self._begun_ns = self._first_ns = perf_counter_ns()  # `_first_ns`: of the first token
        self.slots = self._source.slots

    async def answer(self) -> dict[str, Any]:
        parts = [part async for part in self._parts()]
        thought, text = ("".join(part[i] for part in parts) for i in (0, 1))
        return _answer_object(self._body, text, thought, self._calls) | self._ending()

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        async with aclosing(self._parts()) as parts:
            async for thought, text in parts:
                if thought or text:
                    yield _answer_object(self._body, text, thought)
        if self._calls:
            yield _answer_object(self._body, calls=self._calls)
        yield _answer_object(self._body) | self._ending()

    async def _parts(self) -> AsyncGenerator[tuple[str, str]]:
        """Yield (thinking, text) as they are generated; everything else is complete at the end."""
        async with aclosing(self._source.chunks()) as chunks:
            async for chunk in chunks:
                self._usage = chunk.get("usage") or {}
                for choice in chunk["choices"]:
                    if not self._choice:
                        self._first_ns = perf_counter_ns()
                    self._choice = choice
                    delta = choice.get("delta", {"content": choice.get("text")})
                    for function in (call["function"] for call in delta.get("tool_calls", ())):
                        if "name" in function:
                            self._calls.append({"function": function | {"arguments": ""}})
                        self._calls[-1]["function"]["arguments"] += function["arguments"]
                    yield delta.get("reasoning_content") or "", delta.get("content") or ""
        for call in self._calls:
            call["function"]["arguments"] = arguments_of(call["function"]["arguments"])

    def _ending(self) -> dict[str, Any]:
        """Return the fields of the last object; durations are nanoseconds."""
        now, begun, first, usage = perf_counter_ns(), self._begun_ns, self._first_ns, self._usage
        spent = {"total_duration": now - begun, "load_duration": 0, "prompt_eval_duration": first - begun}
        counts = {"prompt_eval_count": usage["prompt_tokens"], "eval_count": usage["completion_tokens"]}
        reason = "length" if self._choice["finish_reason"] == "length" else "stop"
        return {"done": True, "done_reason": reason, **spent, **counts, "eval_duration": now - first}


def _answer_object(body: OllamaBody, text: str = "", thought: str = "", calls: Any = ()) -> dict[str, Any]:
    """Return an answer, or a part of one, in the form of the body's route."""
    head = {"model": body.model, "created_at": _timestamp(), "done": False}
    own = ({"thinking": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})
    if isinstance(body, GenerateBody):
        return head | {"response": text} | own
    return head | {"message": {"role": "assistant", "content": text} | own}


def _timestamp() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


_SINCE = _timestamp()


def _source(service: Service, body: GenerateBody | OllamaChatBody, tenant: str) -> Chat | Completions:
    info, tools, num_ctx = service.remote.info, service.tools, body.options.num_ctx
    if info is not None and num_ctx > info.max_context:
        words = f"num_ctx is {num_ctx}, and the server's context {info.max_context} tokens (--max-model-len)"
        raise Problem(400, words, param="options.num_ctx")
    if body.think and tools.thinking is None:
        raise Problem(400, "this model does not think; leave think out", param="think")
    given = {k: v for k, v in _DEFAULTS.items() if k not in service.defaults.fields} | _common(body)
    if isinstance(body, OllamaChatBody):
        given |= {"messages": body.messages, "tools": body.tools}
    elif body.raw or not (body.system or tools.template):
        return Completions(service, _CompletionBody.model_validate(given | {"prompt": body.prompt}), tenant)
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        given["messages"] = [*system, {"role": "user", "content": body.prompt}]
    if body.think is not None:
        given["chat_template_kwargs"] = {"enable_thinking": bool(body.think)}
        given["reasoning_effort"] = body.think if isinstance(body.think, str) else None
    return Chat(service, _ChatBody.model_validate(given), tenant)


def _common(body: OllamaBody) -> dict[str, Any]:
    """Return the fields that completions and chats of OpenAI's protocol share."""
    given = body.options.model_dump(exclude_unset=True, by_alias=True)
    most, seed = given.pop("num_predict", 0), given.pop("seed", -1)
    schema = {"schema": body.format} if isinstance(body.format, dict) else None
    kind = "json_schema" if schema else "json_object"
    return given | {
        "most_tokens": most if most > 0 else None,
        "seed": None if seed == -1 else seed,  # -1: new random numbers
        "response_format": {"type": kind, "json_schema": schema} if body.format else None,
        "cache_salt": body.cache_salt,
        "kv_format": body.kv_format,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
