"""Request bodies in OpenAI's protocol, with extensions of other servers; every field is bounded.

Unknown fields are ignored, as in other servers, and listed in a response header. `LABELS` and `USUAL` are
fields of other servers that have no effect.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from kvq.engine.params import (
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_PIN_S,
    MAX_SALT,
    MAX_SAMPLES,
    MAX_SESSION,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    HintAction,
)
from kvq.server.http.body_errors import content_of
from kvq.server.http.ignored import Body, check_usual
from kvq.server.http.strict_json import WHOLE, Flag, JsonObject, LongText, Real
from kvq.strict_json import check_value

MAX_PROMPTS = 64  # limit per completions request
MAX_MESSAGES = 2048
MAX_TOOLS = 128
_MAX_CALLS = 128  # limit per message
_CallId = Annotated[str, Field(max_length=256)]
_FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
_TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]  # validated without a Python call per token
TokenIds = Annotated[list[_TokenId], Field(min_length=1, max_length=1 << 20, fail_fast=True)]
Name = Annotated[str, Field(max_length=1024)]
_Penalty = Annotated[Real, Field(ge=-100, le=100)]
Count = Annotated[int, Field(strict=True, ge=1, le=1 << 30), WHOLE]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=1 << 30), WHOLE]
_TopK = Annotated[int, Field(strict=True, ge=-1, le=1 << 30), WHOLE]  # -1, 0: no limit, as in other servers
_Samples = Annotated[int, Field(strict=True, ge=1, le=MAX_SAMPLES), WHOLE]
Logprobs = Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS), WHOLE]
# Prefixes are shared only between requests with the same key and the same salt
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT)]
# The conversation that a request belongs to, and how long its KV should be kept afterwards
SessionId = Annotated[str, Field(min_length=1, max_length=MAX_SESSION)]
_Seconds = Annotated[Real, Field(ge=0, le=MAX_PIN_S)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Biased = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]  # a token id in canonical form
# Options of `apply_chat_template` that would replace the template or the messages, or change the result
_RESERVED = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize", "self"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "continue_final_message", "conversations"),
    )
)


def _of_session(seconds: Any, info: Any) -> Any:
    if seconds is not None and info.data.get("session_id") is None:
        raise ValueError("needs session_id, the name of the conversation; give both, or leave kv_retain out")
    return seconds


RetainSeconds = Annotated[_Seconds, BeforeValidator(_of_session)]
_NULL = {"type": "null"}


def _few(given: Any) -> Any:
    """Refuse a collection with too many entries before validating the entries."""
    if isinstance(given, dict) and len(given) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} tokens can be biased")
    return given


_Choices = Annotated[list[LongText], Field(min_length=1, max_length=1024)]
_Biases = Annotated[dict[_Biased, _Penalty], BeforeValidator(_few), Field(max_length=MAX_BIASES)]


class _StreamOptions(Body):
    """Options of a streamed response."""

    USUAL: ClassVar = {"include_obfuscation": False}
    include_usage: Flag = False
    _is_usual = model_validator(mode="before")(check_usual)


class _JsonSchema(Body):
    """Named JSON schema; the name has no effect."""

    LABELS: ClassVar = frozenset(("description",))
    model_config = ConfigDict(populate_by_name=True)

    name: Name = ""
    definition: JsonObject = Field(alias="schema")
    strict: Flag | None = None  # schemas are always strict


class _ResponseFormat(Body):
    """Format of the generated text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "_ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema")
        return self


class _StructuredOutputs(Body):
    """Constraints on the text, named as in newer vLLM versions; `guided_*` are the older names."""

    model_config = ConfigDict(extra="forbid")  # an ignored constraint would not constrain

    definition: JsonObject | LongText | None = Field(default=None, alias="json")
    regex: LongText | None = None
    choice: _Choices | None = None
    grammar: LongText | None = None
    json_object: Flag | None = None


def _says_null(schema: dict[str, Any]) -> None:
    """Declare in the schema that every optional field may be null."""
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()):
            if "anyOf" not in field:
                field["anyOf"] = [
                    {key: field.pop(key) for key in [*field] if key not in ("title", "default")}
                ]
            if _NULL not in field["anyOf"]:
                field["anyOf"].append(_NULL)


class Sampling(Body):
    """Sampling fields that protocols share. Null is treated as absent, as in other servers."""

    model_config = ConfigDict(json_schema_extra=_says_null)

    temperature: Annotated[Real, Field(ge=0, le=10)] = 1.0
    top_p: Annotated[Real, Field(gt=0, le=1)] = 1.0
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None = None
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    seed: Annotated[int, Field(strict=True, ge=-(1 << 63), lt=1 << 64), WHOLE] | None = None
    top_k: _TopK | None = None
    min_p: Annotated[Real, Field(ge=0, le=1)] = 0.0

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class Common(Sampling):
    """Fields shared by completions and chat."""

    LABELS: ClassVar = frozenset(
        (
            *("user", "metadata", "store", "safety_identifier"),
            # Prefixes are cached anyway
            *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        )
    )
    model: Name | None = None
    n: _Samples = 1
    stream: Flag = False
    stream_options: _StreamOptions | None = None
    logit_bias: _Biases | None = None
    response_format: _ResponseFormat | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    priority: Literal["interactive", "batch"] | None = None
    cache_salt: CacheSalt | None = None
    session_id: SessionId | None = None
    kv_retain: RetainSeconds | None = None
    kv_format: Name | None = None
    # Fields of the engine, not of OpenAI
    repetition_penalty: Annotated[Real, Field(ge=0.01, le=100)] = 1.0
    min_tokens: CountOrZero = 0
    ignore_eos: Flag = False
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=MAX_STOPS)] = Field([])
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True
    guided_json: JsonObject | LongText | None = None  # or its JSON text
    guided_regex: LongText | None = None
    guided_choice: _Choices | None = None
    guided_grammar: LongText | None = None
    structured_outputs: _StructuredOutputs | None = None
    watermark: Flag | None = None


def _kind_of_prompt(given: Any) -> str | None:
    """Return the kind of a prompt, judged by its first item; errors then refer to items, not to the list."""
    if isinstance(given, list):
        first = given[0] if given else None
        return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"
    return "text" if isinstance(given, str) else None


KIND_OF_PROMPT = Discriminator(
    _kind_of_prompt,
    custom_error_type="prompt_type",
    custom_error_message="Input should be a text, token ids, or a list of these",
)
_Prompts = Annotated[
    Annotated[LongText, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[LongText], Field(min_length=1, max_length=MAX_PROMPTS), Tag("texts")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), Tag("lists")],
    KIND_OF_PROMPT,
]


class CompletionBody(Common):
    """`POST /v1/completions`."""

    prompt: _Prompts
    max_tokens: CountOrZero | None = 16
    best_of: _Samples | None = None
    logprobs: Logprobs | None = None
    echo: Flag = False
    suffix: LongText | None = None


class _TextPart(Body):
    """Text part of a message's content."""

    LABELS: ClassVar = frozenset(("prompt_cache_breakpoint",))
    type: Literal["text"]
    text: LongText


_Parts = Annotated[list[_TextPart], Field(max_length=1024, fail_fast=True)]


class FunctionBody(Body):
    """Function that the model may call."""

    name: _FunctionName
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    parameters: Annotated[JsonObject, Field(max_length=256)] | None = None  # JSON schema
    strict: Flag | None = Field(default=None, exclude=True)  # forced calls always are; no template reads it

    @field_validator("parameters")
    @classmethod
    def _are_of_an_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and schema.get("type", "object") != "object":
            raise ValueError('arguments are an object: the schema\'s type has to be "object"')
        return schema


class _ToolBody(Body):
    """Tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionBody


class _ChosenFunction(Body):
    """Name of a function that must be called."""

    name: _FunctionName


class _ToolChoiceBody(Body):
    """Tool that must be called."""

    type: Literal["function"]
    function: _ChosenFunction


class _CalledFunction(Body):
    """Called function, with the arguments as JSON text."""

    LABELS: ClassVar = frozenset(("parsed_arguments",))  # from the client's `parse`, in addition to the text
    name: _CallId
    arguments: LongText = ""


class _ToolCallBody(Body):
    """Tool call in a message of the assistant."""

    LABELS: ClassVar = frozenset(("index",))  # position of the call in the stream it came from
    id: _CallId | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction


Tools = Annotated[list[_ToolBody], Field(max_length=MAX_TOOLS)]
_ToolCalls = Annotated[list[_ToolCallBody], Field(max_length=_MAX_CALLS)]
_ToolChoices = Literal["none", "auto", "required"] | _ToolChoiceBody


class ChatMessage(Body):
    """Message of a chat; extra fields are passed to the model's chat template."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    content: Annotated[LongText | _Parts | None, BeforeValidator(content_of("part", ("text",)))] = None
    tool_calls: _ToolCalls | None = None
    tool_call_id: _CallId | None = None

    @model_validator(mode="after")
    def _holds_what_can_be_passed_on(self) -> "ChatMessage":
        extra = self.model_extra or {}
        check_value(extra)
        if extra.get("function_call") is not None:
            raise ValueError("function_call is not supported; use tool_calls")
        refusal = extra.get("refusal")  # replaces the content, as in OpenAI's API
        if self.role == "assistant" and self.content is None and isinstance(refusal, str):
            self.content = refusal
        return self


def plain_text(message: ChatMessage) -> str:
    """Return a message's content as a single string."""
    content = message.content or ""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatBody(Common):
    """`POST /v1/chat/completions`."""

    LABELS: ClassVar = Common.LABELS | {"prediction"}  # it would only produce the same response sooner
    USUAL: ClassVar = {"modalities": ["text"], "verbosity": "medium"}
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: Flag = False
    top_logprobs: Logprobs | None = None
    tools: Tools | None = None
    tool_choice: _ToolChoices | None = None
    parallel_tool_calls: Flag = True
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    chat_template_kwargs: Annotated[JsonObject, Field(max_length=64)] | None = None
    reasoning_effort: Name | None = None  # for chat templates that read it

    _is_usual = model_validator(mode="before")(check_usual)

    @model_validator(mode="before")
    @classmethod
    def _uses_tools(cls, data: Any) -> Any:
        if isinstance(data, dict) and (data.get("functions") or data.get("function_call")):
            raise ValueError("functions are not supported; use tools")
        return data

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_the_templates_own(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        if reserved := sorted(_RESERVED & (given or {}).keys()):
            raise ValueError(f"{', '.join(reserved)} can't be given here; see the request's own fields")
        return given


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt or a chat."""

    model: Name | None = None
    prompt: LongText | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: Flag = True
    add_generation_prompt: Flag = True

    @model_validator(mode="after")
    def _has_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class HintBody(Body):
    """`POST /v1/kv/hint`: what should happen to a session's KV."""

    session_id: SessionId
    action: HintAction
    seconds: _Seconds | None = None  # of "retain"


class UnloadAdapterBody(Body):
    """`POST /v1/unload_lora_adapter`, as in vLLM."""

    model: Name | None = None  # to adapt, which a server of several must know
    lora_name: Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapterBody(UnloadAdapterBody):
    """`POST /v1/load_lora_adapter`, as in vLLM. `lora_path`: in the operator's folder."""

    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: Name | None = None
    tokens: Annotated[list[_TokenId], Field(max_length=1 << 20, fail_fast=True)]
