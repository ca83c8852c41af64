"""The shapes of answers, for `/openapi.json`: what a client may rely on."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12


class Status(TypedDict):
    """Of the server."""

    status: Literal["live", "ready", "generating"]
    seconds: NotRequired[float]


class Model(TypedDict):
    """What is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: NotRequired[int]
    vocab_size: NotRequired[int]


class Models(TypedDict):
    """All of them: one."""

    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    """A text's."""

    tokens: list[int]
    count: int
    max_model_len: int | None


class Prompt(TypedDict):
    """The text of tokens."""

    prompt: str


class _CachedTokens(TypedDict):
    """Of a prompt."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _CachedTokens


class TextLogprobs(TypedDict):
    """Of a text's tokens; the first one of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


FinishReason = Literal["stop", "length", "tool_calls", "error"]


class TextChoice(TypedDict):
    """One result."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class Completion(TypedDict):
    """Of a prompt, or of several."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class CalledFunction(TypedDict):
    """Its name, and the arguments' text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One that the model wrote."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    """What the model wrote."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One result."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class ChatCompletion(TypedDict):
    """Of a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class MessageUsage(TypedDict):
    """Tokens of a request, as Anthropic counts them."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"]


class Message(TypedDict):
    """Anthropic's."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class InputTokens(TypedDict):
    """How many a prompt has."""

    input_tokens: int
