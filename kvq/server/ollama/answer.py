"""Answers in Ollama's protocol, made from the streams of OpenAI's."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from time import perf_counter_ns
from typing import Any

from kvq.server.admission.bodies import ChatBody, CompletionBody, Count, CountOrZero
from kvq.server.admission.service import Service
from kvq.server.http.problems import Problem
from kvq.server.ollama.bodies import GenerateBody, OllamaBody, OllamaChatBody
from kvq.server.openai.chat import Chat
from kvq.server.openai.completions import Completions
from kvq.server.openai.respond import Call
from kvq.server.tools.format import arguments_of

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # D382: Ollama's, where the model has none


class _ChatBody(ChatBody):
    most_tokens: Count | None = None


class _CompletionBody(CompletionBody):
    max_tokens: CountOrZero | None = None
    most_tokens: Count | None = None


class OllamaCall(Call):  # D383
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
        return answer_object(self._body, text, thought, self._calls) | self._ending()

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        async with aclosing(self._parts()) as parts:
            async for thought, text in parts:
                if thought or text:
                    yield answer_object(self._body, text, thought)
        if self._calls:
            yield answer_object(self._body, calls=self._calls)
        yield answer_object(self._body) | self._ending()

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


def answer_object(body: OllamaBody, text: str = "", thought: str = "", calls: Any = ()) -> dict[str, Any]:
    """Return an answer, or a part of one, in the form of the body's route."""
    head = {"model": body.model, "created_at": timestamp(), "done": False}
    own = ({"thinking": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})
    if isinstance(body, GenerateBody):
        return head | {"response": text} | own
    return head | {"message": {"role": "assistant", "content": text} | own}


def timestamp() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


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
        "stream": True,
        "stream_options": {"include_usage": True},
    }
