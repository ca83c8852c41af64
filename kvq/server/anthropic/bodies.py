"""What clients send, as Anthropic defines it; every field has its bounds.

Fields that nobody here knows are ignored and named, but for those whose loss would change an answer.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kvq.server.anthropic.blocks import (
    MAX_BLOCKS,
    CacheControl,
    CustomTool,
    TextBlock,
    TextBlocks,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    blocks_of,
)
from kvq.server.bodies import MAX_MESSAGES, CacheSalt
from kvq.server.ignored import Labelled, check_usual
from kvq.server.strict_json import WHOLE, Flag, JsonObject, LongText, Real
from kvq.server.tool_bodies import MAX_TOOLS

_Share = Annotated[Real, Field(ge=0, le=1)]
_UNSUPPORTED = ("container", "mcp_servers", "context_management", "compaction", "output_format")
# What Anthropic's client looks for: it then sends whole conversations, and no thread.
_NO_THREADS = "thread_unsupported_request"


class Message(BaseModel):
    """One turn."""

    role: Literal["user", "assistant"]
    content: Annotated[
        list[Annotated[TextBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]],
        Field(max_length=MAX_BLOCKS, fail_fast=True),
        blocks_of("text", "tool_use", "tool_result"),
    ]

    @model_validator(mode="after")
    def _holds_its_own_blocks(self) -> "Message":
        foreign = ToolUseBlock if self.role == "user" else ToolResultBlock
        for block in self.content:
            if isinstance(block, foreign):
                raise ValueError(f"a turn of role {self.role!r} can't hold {block.type} blocks")
        return self


class Thinking(BaseModel):
    """Whether the model shall think; it can't be told to."""

    type: Literal["disabled"]


class OutputFormat(BaseModel):
    """What the text has to be."""

    type: Literal["json_schema"]
    definition: JsonObject = Field(alias="schema")


class OutputConfig(BaseModel):
    """How to answer; `effort` is not known."""

    format: OutputFormat | None = None


class Metadata(BaseModel):
    """Of the request; not used."""

    user_id: Annotated[str, Field(max_length=256)] | None = None


class PromptBody(Labelled, BaseModel):
    """What a prompt is made of, and what else may be asked about one that is only counted."""

    LABELS: ClassVar = frozenset(("user_profile_id",))
    USUAL: ClassVar = {"speed": "standard"}
    model: Annotated[str, Field(max_length=1024)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: TextBlocks = []
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None  # behind the last block
    output_config: OutputConfig | None = None
    _is_usual = model_validator(mode="before")(check_usual)

    @field_validator("thinking", mode="before")
    @classmethod
    def _does_not_think(cls, thinking: Any) -> Any:
        if isinstance(thinking, dict) and thinking.get("type") != "disabled":
            raise ValueError("thinking is not supported; leave it out")
        return thinking

    @model_validator(mode="before")
    @classmethod
    def _asks_for_nothing_else(cls, body: Any) -> Any:
        for name in _UNSUPPORTED:
            if isinstance(body, dict) and body.get(name):
                raise ValueError(f"{name} is not supported; leave it out")
        if isinstance(body, dict) and body.get("thread"):
            words = "no thread is held here between requests; send the whole conversation, without thread"
            raise PydanticCustomError(_NO_THREADS, words, {"code": _NO_THREADS})
        return body


class MessagesBody(PromptBody):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(strict=True, ge=1, le=1 << 30), WHOLE]
    temperature: _Share = 1.0
    top_p: _Share | None = None
    top_k: Annotated[int, Field(strict=True, ge=0, le=1 << 30), WHOLE] | None = None
    stop_sequences: Annotated[list[LongText], Field(max_length=64)] = []
    stream: Flag = False
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] = "auto"
    cache_salt: CacheSalt | None = None  # not Anthropic's
