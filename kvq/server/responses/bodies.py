"""Request body of the Responses API; every field is bounded.

A conversation is a list of items: messages, thoughts, calls of functions and their results.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator

from kvq.server.admission.bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Common,
    Count,
    FunctionBody,
    Logprobs,
    Name,
)
from kvq.server.http.body_errors import content_of, refuse_tool
from kvq.server.http.ignored import Body, check_usual
from kvq.server.http.strict_json import WHOLE, Flag, JsonObject, LongText

LOGPROBS = "message.output_text.logprobs"  # in `include`; other names there have no effect
_UNSUPPORTED = {
    "conversation": "send the whole conversation as input, or previous_response_id",
    "prompt": "send its text as instructions and input",
    "background": "wait for the response, or stream it",
    "context_management": "shorten the input before you send it",
    "response_format": "use text.format",
}
# Fields of items that come from earlier responses, and that no template reads
_OF_RESPONSES = frozenset(("id", "status", "phase", "caller", "namespace", "parsed_arguments"))
_Id = Annotated[str, Field(max_length=256)]


class _ItemText(Body):
    """Text part of a message, of a result or of thinking."""

    LABELS: ClassVar = frozenset(("annotations", "logprobs", "parsed", "prompt_cache_breakpoint"))
    type: Literal["input_text", "output_text", "summary_text", "reasoning_text"]
    text: LongText


_Parts = Annotated[list[_ItemText], Field(max_length=1024, fail_fast=True)]
_Text = Annotated[LongText | _Parts, BeforeValidator(content_of("part", ("input_text", "output_text")))]


class _InputMessage(Body):
    """Message of a user, of the developer, or of the assistant."""

    LABELS: ClassVar = _OF_RESPONSES
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Text


class _FunctionCall(Body):
    """Function call made by the assistant, with the arguments as JSON text."""

    LABELS: ClassVar = _OF_RESPONSES
    type: Literal["function_call"]
    call_id: _Id
    name: _Id
    arguments: LongText = ""


class _FunctionCallOutput(Body):
    """Result of a function call."""

    LABELS: ClassVar = _OF_RESPONSES
    type: Literal["function_call_output"]
    call_id: _Id
    output: _Text


class _Reasoning(Body):
    """Thinking of the assistant before the items that follow; encrypted thinking is not read."""

    LABELS: ClassVar = _OF_RESPONSES | {"encrypted_content"}
    type: Literal["reasoning"]
    summary: _Parts = Field([])
    content: _Parts | None = None


class ItemReference(Body):
    """Reference to an output item of a stored response."""

    type: Literal["item_reference"]
    id: _Id


_Item = Annotated[
    _InputMessage | _FunctionCall | _FunctionCallOutput | _Reasoning | ItemReference,
    Field(discriminator="type"),
]
_Items = Annotated[list[_Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
ITEM: TypeAdapter[Any] = TypeAdapter(_Item)
_check_kinds = content_of(
    "item", ("message", "function_call", "function_call_output", "reasoning", "item_reference")
)


def _typed(given: Any) -> Any:
    """Give messages without a type their type, and refuse items of kinds that can't be read."""
    if not isinstance(given, list):
        return _check_kinds(given)
    items = [
        {"type": "message"} | item if isinstance(item, dict) and "role" in item else item for item in given
    ]
    return _check_kinds(items)


class _FunctionTool(FunctionBody):
    """Function that the model may call; tools that OpenAI's servers run are not supported."""

    type: Literal["function"]
    _is_the_clients_own = model_validator(mode="before")(refuse_tool("function"))


class _NamedFunction(Body):
    """Function that must be called."""

    type: Literal["function"]
    name: _Id


class AllowedTools(Body):
    """Some of the tools, of which the model may or must call one; it does not see the others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


class _Format(Body):
    """Format of the generated text; schemas are always strict, and their names have no effect."""

    LABELS: ClassVar = frozenset(("description",))
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    definition: JsonObject | None = Field(default=None, alias="schema")
    strict: Flag | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "_Format":
        if (self.type == "json_schema") != (self.definition is not None):
            raise ValueError("schema belongs to type json_schema")
        return self


class _TextOptions(Body):
    """Options of the generated text."""

    USUAL: ClassVar = {"verbosity": "medium"}
    format: _Format = _Format(type="text")
    _is_usual = model_validator(mode="before")(check_usual)


class _ReasoningOptions(Body):
    """Options of the thinking; effort "none" switches it off, if the template has a switch."""

    LABELS: ClassVar = frozenset(("summary", "generate_summary"))
    effort: Annotated[str, Field(max_length=64)] | None = None


class ResponsesBody(Common):
    """`POST /v1/responses`, with the extensions of completions and chats."""

    LABELS: ClassVar = Common.LABELS - {"user", "metadata", "store"} | {"max_tool_calls"}
    USUAL: ClassVar = {"background": False}
    input: Annotated[LongText | _Items, BeforeValidator(_typed)]
    instructions: LongText | None = None
    previous_response_id: _Id | None = None
    store: Flag = True
    tools: Annotated[list[_FunctionTool], Field(max_length=MAX_TOOLS)] = Field([])
    tool_choice: Literal["none", "auto", "required"] | _NamedFunction | AllowedTools = "auto"
    parallel_tool_calls: Flag = True
    max_output_tokens: Count | None = None
    text: _TextOptions = _TextOptions()
    reasoning: _ReasoningOptions = _ReasoningOptions()
    include: Annotated[list[Name], Field(max_length=16)] = Field([])
    top_logprobs: Logprobs | None = None
    truncation: Literal["disabled"] = "disabled"
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
        Field(max_length=16),
    ] = Field({})
    user: Name | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=1), WHOLE] = 1
    response_format: None = None

    @model_validator(mode="before")
    @classmethod
    def _asks_for_nothing_else(cls, body: Any) -> Any:
        for name, remedy in _UNSUPPORTED.items():
            if isinstance(body, dict) and body.get(name):
                raise ValueError(f"{name} is not supported; {remedy}")
        return check_usual(cls, body)
