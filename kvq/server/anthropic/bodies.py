"""What clients send, as Anthropic defines it; every field has its bounds.

Fields that nobody here knows are passed over, but for those whose loss would change an answer.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from kvq.server.bodies import MAX_MESSAGES

_MAX_BLOCKS = 1024
_Text = Annotated[str, Field(max_length=4 << 20)]
_Name = Annotated[str, Field(max_length=256)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_UNSUPPORTED = ("tools", "container", "mcp_servers", "context_management", "output_format")


class CacheControl(BaseModel):
    """What lies before it, and the block itself, shall stay cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def seconds(self) -> float:
        """For how long."""
        return 300.0 if self.ttl == "5m" else 3600.0


class Marked(BaseModel):
    """Anything that a breakpoint may lie behind."""

    cache_control: CacheControl | None = None


class TextBlock(Marked):
    """Text."""

    type: Literal["text"]
    text: _Text


def _as_blocks(content: Any) -> Any:
    """A text as a list of one block; kinds of blocks that no model here can read are named."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    for block in content if isinstance(content, list) else ():
        kind = block.get("type", "text") if isinstance(block, dict) else "text"
        if kind != "text":
            raise ValueError(f"blocks of type {kind!r:.50} are not supported; this server reads text")
    return content


class Message(BaseModel):
    """One turn."""

    role: Literal["user", "assistant"]
    content: Annotated[list[TextBlock], Field(max_length=_MAX_BLOCKS)]

    _blocks = field_validator("content", mode="before")(_as_blocks)


class Thinking(BaseModel):
    """Whether the model shall think; it can't be told to."""

    type: Literal["disabled"]


class OutputFormat(BaseModel):
    """What the text has to be."""

    type: Literal["json_schema"]
    definition: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """How to answer; `effort` is passed over."""

    format: OutputFormat | None = None


class Metadata(BaseModel):
    """Of the request; not used."""

    user_id: _Name | None = None


class PromptBody(BaseModel):
    """What a prompt is made of."""

    model: Annotated[str, Field(max_length=1024)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[list[TextBlock], Field(max_length=_MAX_BLOCKS)] = []
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None  # behind the last block

    _blocks = field_validator("system", mode="before")(_as_blocks)

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
        return body


class MessagesBody(PromptBody):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=1 << 30)]
    temperature: _Share = 1.0
    top_p: _Share | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 30)] | None = None
    stop_sequences: Annotated[list[_Text], Field(max_length=64)] = []
    stream: bool = False
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] = "auto"
    output_config: OutputConfig | None = None
