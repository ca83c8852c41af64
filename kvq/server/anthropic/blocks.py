"""What clients send block by block: text, calls and their results, and tools; any of them may be marked."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from kvq.server.ignored import Labelled, check_usual
from kvq.server.strict_json import Flag, JsonObject, LongText
from kvq.server.text_only import content_of
from kvq.server.tool_bodies import FunctionBody

MAX_BLOCKS = 1024
# What other models' turns are made of, beside what is in this module.
_THOUGHTS = ("thinking", "redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_result")
_Id = Annotated[str, Field(max_length=256)]


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
    text: LongText


def blocks_of(*kinds: str) -> BeforeValidator:
    """Before blocks of these kinds: a text is one block; others are refused in words."""
    check = content_of("block", kinds, _THOUGHTS)

    def as_blocks(content: Any) -> Any:
        return [{"type": "text", "text": content}] if isinstance(content, str) else check(content)

    return BeforeValidator(as_blocks)


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS, fail_fast=True), blocks_of("text")]


class ToolUseBlock(Labelled, Marked):
    """A call that the assistant made."""

    USUAL: ClassVar = {"caller": {"type": "direct"}}
    type: Literal["tool_use"]
    id: _Id
    name: _Id
    input: Annotated[JsonObject, Field(max_length=1024)]
    _is_usual = model_validator(mode="before")(check_usual)


class ToolResultBlock(Labelled, Marked):
    """What came of a call. Whether it failed is for its text to say: no template asks."""

    LABELS: ClassVar = frozenset(("is_error",))
    type: Literal["tool_result"]
    tool_use_id: _Id
    content: TextBlocks = []


class CustomTool(Labelled, FunctionBody, Marked):
    """A function that the model may call; Anthropic's own tools are not here."""

    LABELS: ClassVar = frozenset(("eager_input_streaming",))  # as arguments always come here
    USUAL: ClassVar = {"allowed_callers": ["direct"], "defer_loading": False}
    type: Literal["custom"] = "custom"
    parameters: Annotated[JsonObject, Field(alias="input_schema", max_length=256)]
    _is_usual = model_validator(mode="before")(check_usual)

    @model_validator(mode="before")
    @classmethod
    def _is_the_clients_own(cls, tool: Any) -> Any:
        kind = tool.get("type", "custom") if isinstance(tool, dict) else "custom"
        if kind != "custom":
            raise ValueError(f"tools of type {kind!r:.50} are not supported, only custom ones")
        return tool


class ToolChoice(BaseModel):
    """Which tools may or have to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: _Id | None = None
    disable_parallel_tool_use: Flag = False

    @model_validator(mode="after")
    def _names_its_tool(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a name belongs to type tool")
        return self
