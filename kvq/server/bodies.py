"""What clients send, as OpenAI and the field's servers define it; every field has its bounds.

Fields that nobody here knows are passed over, as other servers do.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvq.server.tool_bodies import ToolCallId, ToolCalls, ToolChoices, Tools

MAX_PROMPTS = 64  # of one completions request
MAX_MESSAGES = 2048
_Float = Annotated[float, Field(allow_inf_nan=False)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], Field(min_length=1, max_length=1 << 20)]
_Text = Annotated[str, Field(max_length=4 << 20)]


class StreamOptions(BaseModel):
    """Of a streamed answer."""

    include_usage: bool = False


class JsonSchema(BaseModel):
    """A named schema; the name is for the reader only."""

    model_config = ConfigDict(populate_by_name=True)

    name: str = ""
    definition: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema")
        return self


class Common(BaseModel):
    """Of completions and chat."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    temperature: _Float = 1.0
    top_p: _Float = 1.0
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    presence_penalty: _Float = 0.0
    frequency_penalty: _Float = 0.0
    logit_bias: Annotated[dict[str, _Float], Field(max_length=1024)] | None = None
    seed: int | None = None
    response_format: ResponseFormat | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    priority: Literal["interactive", "batch"] | None = None
    # The engine's own
    top_k: int | None = None
    min_p: _Float = 0.0
    repetition_penalty: _Float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], Field(max_length=64)] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    guided_regex: _Text | None = None
    guided_choice: Annotated[list[_Text], Field(min_length=1, max_length=1024)] | None = None
    guided_grammar: _Text | None = None


class CompletionBody(Common):
    """`POST /v1/completions`."""

    prompt: (
        _Text
        | _TokenIds
        | Annotated[list[_Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[_TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: int | None = 16
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: _Text


class ChatMessage(BaseModel):
    """One turn; whatever else it holds is for the model's template."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(max_length=64)]
    content: _Text | Annotated[list[TextPart], Field(max_length=1024)] | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: ToolCallId | None = None


class ChatBody(Common):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: ToolChoices | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(BaseModel):
    """`POST /tokenize`: a prompt, or a chat."""

    model: str | None = None
    prompt: _Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _has_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(BaseModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], Field(max_length=1 << 20)]
