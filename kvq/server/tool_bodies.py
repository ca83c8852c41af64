"""Tools as clients of OpenAI's protocol send them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator

from kvq.server.ignored import Labelled
from kvq.server.strict_json import Flag, JsonObject, LongText

MAX_TOOLS = 128
MAX_CALLS = 128  # of one message
_Id = Annotated[str, Field(max_length=256)]
_Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionBody(BaseModel):
    """A function that the model may call."""

    name: _Name
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    parameters: Annotated[JsonObject, Field(max_length=256)] | None = None  # JSON schema
    strict: Flag | None = Field(default=None, exclude=True)  # forced calls always are; no template asks

    @field_validator("parameters")
    @classmethod
    def _are_of_an_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and schema.get("type", "object") != "object":
            raise ValueError('arguments are an object: the schema\'s type has to be "object"')
        return schema


class ToolBody(BaseModel):
    """A tool; only functions are known."""

    type: Literal["function"]
    function: FunctionBody


class ChosenFunction(BaseModel):
    """Its name."""

    name: _Name


class ToolChoiceBody(BaseModel):
    """The tool that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


class CalledFunction(Labelled, BaseModel):
    """What was called, with the arguments' JSON text."""

    LABELS: ClassVar = frozenset(("parsed_arguments",))  # of the client's own `parse`, beside their text
    name: _Id
    arguments: LongText = ""


class ToolCallBody(Labelled, BaseModel):
    """A call that an assistant's message made."""

    LABELS: ClassVar = frozenset(("index",))  # of its place in the stream that it was read from
    id: _Id | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


Tools = Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)]
ToolCalls = Annotated[list[ToolCallBody], Field(max_length=MAX_CALLS)]
ToolChoices = Literal["none", "auto", "required"] | ToolChoiceBody
ToolCallId = _Id
