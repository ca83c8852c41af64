"""JSON schemas of responses, for `/openapi.json`: the fields that a client may rely on."""

from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_NULL: Schema = {"type": "null"}
_ANY_OBJECT: Schema = {"additionalProperties": True, "type": "object"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}


def named(name: str) -> Schema:
    """Return a reference to the schema `name` in the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


def _one_of(*texts: str) -> Schema:
    return {"type": "string", "const": texts[0]} if len(texts) == 1 else {"type": "string", "enum": [*texts]}


def _list_of(schema: Schema) -> Schema:
    return {"items": schema, "type": "array"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL]}


def _answer(description: str, optional: Sequence[str] = (), /, **fields: Schema) -> Schema:
    """Return the schema of a response or of an object in one. All fields not in `optional` are required."""
    titled = {
        name: field if "$ref" in field else field | {"title": name.replace("_", " ").title()}
        for name, field in fields.items()
    }
    required = [name for name in fields if name not in optional]
    return {"properties": titled, "type": "object", "required": required, "description": description}


def _whole(description: str, kind: str, choice: str) -> Schema:
    """Return the schema of a complete (not streamed) response in OpenAI's protocol."""
    head = {"id": TEXT, "object": _one_of(kind), "created": _INTEGER, "model": TEXT}
    return _answer(description, **head, choices=_list_of(named(choice)), usage=named("Usage"))


_COUNTS = [f"{what}_duration" for what in ("total", "load", "prompt_eval", "eval")]
_COUNTS += ["prompt_eval_count", "eval_count"]
_FINISH_REASON = _one_of("stop", "length", "tool_calls", "error")
_ANSWERS = {  # D320: for the document only; fuzzing validates responses
    "Status": _answer(
        "State of the server.", ["seconds"], status=_one_of("live", "ready", "generating"), seconds=_NUMBER
    ),
    "Model": _answer(
        "The served model, under one of its names.",
        ["max_model_len", "vocab_size"],
        id=TEXT,
        object=_one_of("model"),
        created=_INTEGER,
        owned_by=TEXT,
        max_model_len=_INTEGER,
        vocab_size=_INTEGER,
    ),
    "Models": _answer("All names of the model.", object=_one_of("list"), data=_list_of(named("Model"))),
    "Tokens": _answer(
        "Token ids of a text.", tokens=_list_of(_INTEGER), count=_INTEGER, max_model_len=_or_null(_INTEGER)
    ),
    "Hint": _answer("A hint was passed on to the engine.", accepted={"type": "boolean"}),
    "Prompt": _answer("Text of token ids.", prompt=TEXT),
    "InputTokens": _answer("Number of a prompt's tokens.", input_tokens=_INTEGER),
    "CachedTokens": _answer(
        "Prompt tokens found in the cache; for each prompt that left it, where and why.",
        ["misses"],
        cached_tokens=_INTEGER,
        misses=_list_of(_ANY_OBJECT),
    ),
    "Usage": _answer(
        "Tokens of a request.",
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _INTEGER),
        prompt_tokens_details=named("CachedTokens"),
    ),
    "TextLogprobs": _answer(
        "Log-probabilities of a text's tokens; a prompt's first token has none.",
        tokens=_list_of(TEXT),
        token_logprobs=_list_of(_or_null(_NUMBER)),
        top_logprobs=_list_of(_or_null({"additionalProperties": _NUMBER, "type": "object"})),
        text_offset=_list_of(_INTEGER),
    ),
    "TextChoice": _answer(
        "One result.",
        index=_INTEGER,
        text=TEXT,
        logprobs=_or_null(named("TextLogprobs")),
        finish_reason=_FINISH_REASON,
    ),
    "Completion": _whole("Completion of a prompt, or of several.", "text_completion", "TextChoice"),
    "WrittenFunction": _answer("A function's name, and its arguments as text.", name=TEXT, arguments=TEXT),
    "ToolCall": _answer(
        "A call that the model wrote.", id=TEXT, type=_one_of("function"), function=named("WrittenFunction")
    ),
    "AssistantMessage": _answer(
        "The message that the model wrote.",
        ["reasoning_content", "tool_calls"],
        role=_one_of("assistant"),
        content=_or_null(TEXT),
        reasoning_content=TEXT,
        refusal=_NULL,
        tool_calls=_list_of(named("ToolCall")),
    ),
    "ChatChoice": _answer(
        "One result.",
        index=_INTEGER,
        message=named("AssistantMessage"),
        logprobs=_or_null(_ANY_OBJECT),
        finish_reason=_FINISH_REASON,
    ),
    "ChatCompletion": _whole("Answer in a conversation.", "chat.completion", "ChatChoice"),
    "MessageUsage": _answer(
        "Tokens of a request, as Anthropic counts them.",
        input_tokens=_INTEGER,
        cache_creation_input_tokens=_INTEGER,
        cache_read_input_tokens=_INTEGER,
        output_tokens=_INTEGER,
        service_tier=_one_of("standard"),
    ),
    "MessageAnswer": _answer(
        "Answer in a conversation, as Anthropic defines it.",
        id=TEXT,
        type=_one_of("message"),
        role=_one_of("assistant"),
        model=TEXT,
        content=_list_of(_ANY_OBJECT),
        stop_reason=_one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        stop_sequence=_or_null(TEXT),
        usage=named("MessageUsage"),
    ),
    "ResponseAnswer": _answer(
        "Response to a conversation, with the fields of its request.",
        id=TEXT,
        object=_one_of("response"),
        **dict.fromkeys(("created_at", "completed_at"), _INTEGER),
        model=TEXT,
        status=_one_of("completed", "incomplete"),
        **dict.fromkeys(("error", "incomplete_details"), _or_null(_ANY_OBJECT)),
        output=_list_of(_ANY_OBJECT),
        usage=_ANY_OBJECT,
        previous_response_id=_or_null(TEXT),
    ),
    "OllamaAnswer": _answer(
        "Answer as Ollama defines it; durations are nanoseconds.",
        ["response", "message", "thinking", "done_reason", *_COUNTS],
        **dict.fromkeys(("model", "created_at", "response", "thinking"), TEXT),
        message=_ANY_OBJECT,
        done={"type": "boolean"},
        done_reason=_one_of("stop", "length", "load"),
        **dict.fromkeys(_COUNTS, _INTEGER),
    ),
}
_ERRORS = {
    "OllamaError": _object(error=TEXT),
    "Error": _object(error=_object(message=TEXT, type=TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)),
    "MessagesError": _object(
        type={"const": "error"},
        error={
            **_object(type=TEXT, message=TEXT),
            "properties": {"type": TEXT, "message": TEXT, "details": _object(error_code=TEXT)},
        },
    ),
}
SCHEMAS = {name: {**schema, "title": name} for name, schema in _ANSWERS.items()} | _ERRORS
