"""Request bodies in Anthropic's protocol; every field is bounded.

Unknown fields are ignored and listed in a response header. Fields that can't be ignored without changing the
response are refused.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from kvq.server.admission.bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CacheSalt,
    Count,
    CountOrZero,
    FunctionBody,
    Name,
    RetainSeconds,
    SessionId,
)
from kvq.server.http.body_errors import content_of, refuse_tool
from kvq.server.http.ignored import Body, check_usual
from kvq.server.http.strict_json import Flag, JsonObject, LongText, Real

_MAX_BLOCKS = 1024
# Kinds of blocks in the turns of other models, beyond those in this module
_THOUGHTS = ("redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_result")
_Share = Annotated[Real, Field(ge=0, le=1)]
_UNSUPPORTED = ("container", "mcp_servers", "context_management", "compaction", "output_format")
# Error code that makes Anthropic's client send complete conversations instead of a thread
_NO_THREADS = "thread_unsupported_request"  # D323: threads refused with the code its client looks for
_Id = Annotated[str, Field(max_length=256)]


class _CacheControl(Body):
    """Request to cache a block and everything before it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def seconds(self) -> float:
        return 300.0 if self.ttl == "5m" else 3600.0


class _Marked(Body):
    """Block or tool that may be followed by a cache breakpoint."""

    cache_control: _CacheControl | None = None


class TextBlock(_Marked):
    """Text block of a message."""

    type: Literal["text"]
    text: LongText


def _blocks_of(*kinds: str) -> BeforeValidator:
    """Return a "before" validator that converts a text to one block and refuses blocks of other kinds."""
    check = content_of("block", kinds, _THOUGHTS)

    def as_blocks(content: Any) -> Any:
        return [{"type": "text", "text": content}] if isinstance(content, str) else check(content)

    return BeforeValidator(as_blocks)


TextBlocks = Annotated[list[TextBlock], Field(max_length=_MAX_BLOCKS, fail_fast=True), _blocks_of("text")]


class ToolUseBlock(_Marked):
    """Tool call made by the assistant."""

    USUAL: ClassVar = {"caller": {"type": "direct"}}
    type: Literal["tool_use"]
    id: _Id
    name: _Id
    input: Annotated[JsonObject, Field(max_length=1024)]
    _is_usual = model_validator(mode="before")(check_usual)


class ToolResultBlock(_Marked):
    """Result of a tool call. Its text must state whether the call failed, as no template reads the flag."""

    LABELS: ClassVar = frozenset(("is_error",))
    type: Literal["tool_result"]
    tool_use_id: _Id
    content: TextBlocks = Field([])


class ThinkingBlock(_Marked):
    """Thinking of the assistant, without a signature."""

    LABELS: ClassVar = frozenset(("signature",))
    type: Literal["thinking"]
    thinking: LongText


class CustomTool(FunctionBody, _Marked):
    """Function that the model may call; Anthropic's own tools are not supported."""

    LABELS: ClassVar = frozenset(("eager_input_streaming",))  # arguments are always streamed this way
    USUAL: ClassVar = {"allowed_callers": ["direct"], "defer_loading": False}
    type: Literal["custom"] = "custom"
    parameters: Annotated[JsonObject, Field(alias="input_schema", max_length=256)]
    _is_usual = model_validator(mode="before")(check_usual)
    _is_the_clients_own = model_validator(mode="before")(refuse_tool("custom"))


class _ToolChoice(Body):
    """Choice of the tools that may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: _Id | None = None
    disable_parallel_tool_use: Flag = False

    @model_validator(mode="after")
    def _names_its_tool(self) -> "_ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a name belongs to type tool")
        return self


class Message(Body):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    content: Annotated[
        list[
            Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]
        ],
        Field(max_length=_MAX_BLOCKS, fail_fast=True),
        _blocks_of("text", "thinking", "tool_use", "tool_result"),
    ]

    @model_validator(mode="after")
    def _holds_its_own_blocks(self) -> "Message":
        foreign = (ToolUseBlock, ThinkingBlock) if self.role == "user" else ToolResultBlock
        for block in self.content:
            if isinstance(block, foreign):
                raise ValueError(f"a turn of role {self.role!r} can't hold {block.type} blocks")
        return self


class _Thinking(Body):
    """Switch for the model's thinking, if its template has one."""

    type: Literal["enabled", "adaptive", "disabled"]


class _OutputFormat(Body):
    """Format of the generated text."""

    type: Literal["json_schema"]
    definition: JsonObject = Field(alias="schema")


class _OutputConfig(Body):
    """Options of the output; `effort` is not supported."""

    format: _OutputFormat | None = None


class _Metadata(Body):
    """Metadata of the request, which the server ignores."""

    user_id: Annotated[str, Field(max_length=256)] | None = None


class PromptBody(Body):
    """Fields that define a prompt, in requests for a message or for a token count."""

    LABELS: ClassVar = frozenset(("user_profile_id",))
    USUAL: ClassVar = {"speed": "standard"}
    model: Annotated[str, Field(max_length=1024)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: TextBlocks = Field([])
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS)] = Field([])
    tool_choice: _ToolChoice = _ToolChoice(type="auto")
    thinking: _Thinking | None = None
    cache_control: _CacheControl | None = None  # after the last block
    output_config: _OutputConfig | None = None
    _is_usual = model_validator(mode="before")(check_usual)

    @model_validator(mode="before")
    @classmethod
    def _asks_for_nothing_else(cls, body: Any) -> Any:
        for name in _UNSUPPORTED:
            if isinstance(body, dict) and body.get(name):
                raise ValueError(f"{name} is not supported; leave it out")
        if isinstance(body, dict) and body.get("thread"):
            words = "no thread is kept between requests; send the whole conversation, without thread"
            raise PydanticCustomError(_NO_THREADS, words, {"code": _NO_THREADS})
        return body


class MessagesBody(PromptBody):
    """`POST /v1/messages`."""

    max_tokens: Count
    temperature: _Share = 1.0
    top_p: _Share | None = None
    top_k: CountOrZero | None = None
    stop_sequences: Annotated[list[LongText], Field(max_length=64)] = Field([])
    stream: Flag = False
    metadata: _Metadata | None = None
    service_tier: Literal["auto", "standard_only"] = "auto"
    cache_salt: CacheSalt | None = None  # this and the following are not in Anthropic's API
    session_id: SessionId | None = None
    kv_retain: RetainSeconds | None = None
    kv_format: Name | None = None
