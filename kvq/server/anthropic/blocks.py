"""What clients send block by block: text, calls and their results, and tools; any of them may be marked."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from kvq.server.strict_json import Flag, JsonObject
from kvq.server.tool_bodies import FunctionBody

MAX_BLOCKS = 1024
_KINDS = ("text", "tool_use", "tool_result")
_Text = Annotated[str, Field(max_length=4 << 20)]
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
    text: _Text


def as_blocks(content: Any) -> Any:
    """A text as a list of one block; kinds of blocks that no model here can read are named.

    Raises:
        ValueError: there is such a block.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    for block in content if isinstance(content, list) else ():
        kind = block.get("type", "text") if isinstance(block, dict) else "text"
        if kind not in _KINDS:
            raise ValueError(f"blocks of type {kind!r:.50} are not supported, only {', '.join(_KINDS)}")
    return content


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS)]


class ToolUseBlock(Marked):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: _Id
    name: _Id
    input: Annotated[JsonObject, Field(max_length=1024)]


class ToolResultBlock(Marked):
    """What came of a call. Whether it failed is for its text to say: no template asks."""

    type: Literal["tool_result"]
    tool_use_id: _Id
    content: TextBlocks = []

    _blocks = field_validator("content", mode="before")(as_blocks)


class CustomTool(FunctionBody, Marked):
    """A function that the model may call; Anthropic's own tools are not here."""

    type: Literal["custom"] = "custom"
    parameters: Annotated[JsonObject, Field(alias="input_schema", max_length=256)]

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
