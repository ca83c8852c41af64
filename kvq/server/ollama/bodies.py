"""Request bodies in Ollama's protocol; every field is bounded."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from kvq.server.admission.bodies import (
    MAX_MESSAGES,
    CacheSalt,
    ChatMessage,
    CountOrZero,
    Name,
    Sampling,
    Tools,
)
from kvq.server.http.ignored import Body
from kvq.server.http.strict_json import WHOLE, Flag, JsonObject, LongText, Real

_UNSUPPORTED = {
    "images": "this server reads text only; describe them in words",
    "template": "the model's own chat template is used, and with raw none",
    "suffix": "no text is inserted before it",
    "context": "no conversation is kept between requests; send all of it to /api/chat",
}
_OPENAIS = {"thinking": "reasoning_content", "tool_name": "name"}  # names of a message's fields
_LOADING = "num_batch num_gpu main_gpu num_thread num_keep low_vram f16_kv numa use_mmap use_mlock vocab_only"


def _checked(cls: type, given: Any) -> Any:
    """Refuse fields that can't be ignored without changing the response, and drop those that are null."""
    if not isinstance(given, dict):
        return given
    for name, why in _UNSUPPORTED.items():
        if given.get(name):
            raise ValueError(f"{name} is not supported: {why}")
    return {name: value for name, value in given.items() if value is not None}


class _OllamaOptions(Sampling):
    """Sampling; how a model is loaded is said by options of `kvq serve`, and only a label here."""

    LABELS: ClassVar = frozenset(_LOADING.split())
    num_predict: Annotated[int, Field(strict=True, ge=-2, le=1 << 30), WHOLE] = -1  # 0 or less: what fits
    num_ctx: CountOrZero = 0
    repeat_penalty: Annotated[Real, Field(ge=0.01, le=100, serialization_alias="repetition_penalty")] = 1.0


class OllamaBody(Body):
    """Fields shared by `/api/generate` and `/api/chat`; `/api/show` has these at most."""

    LABELS: ClassVar = frozenset(("keep_alive", "verbose"))  # a server keeps its model, and tells all of it
    model: Annotated[str, Field(max_length=1024)]
    format: Literal["", "json"] | JsonObject | None = None  # or a JSON schema
    options: _OllamaOptions = _OllamaOptions()
    think: Flag | Annotated[str, Field(max_length=64)] | None = None  # or an effort, if the template reads it
    stream: Flag = True
    cache_salt: CacheSalt | None = None  # not in Ollama's API
    kv_format: Name | None = None  # nor this
    _is_checked = model_validator(mode="before")(_checked)


class GenerateBody(OllamaBody):
    """`POST /api/generate`."""

    prompt: LongText = ""
    system: LongText = ""
    raw: Flag = False


class _OllamaMessage(ChatMessage):
    """Message of a chat: OpenAI's but for two names, and for the arguments of calls, which are objects."""

    @model_validator(mode="before")
    @classmethod
    def _as_openais(cls, given: Any) -> Any:
        if isinstance(given := _checked(cls, given), dict):
            given = {_OPENAIS.get(name, name): value for name, value in given.items()}
            if isinstance(calls := given.get("tool_calls"), list):
                given["tool_calls"] = [_with_text(call) for call in calls]
        return given


class OllamaChatBody(OllamaBody):
    """`POST /api/chat`."""

    messages: Annotated[list[_OllamaMessage], Field(max_length=MAX_MESSAGES)] = Field([])
    tools: Tools | None = None


def _with_text(call: Any) -> Any:
    match call:
        case {"function": {"arguments": dict(arguments), **function}, **others}:
            return others | {"function": function | {"arguments": json.dumps(arguments, ensure_ascii=False)}}
    return call
