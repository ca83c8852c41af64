"""Tool calling: the format of the served model, and the tools offered by a request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvq.engine import SamplingParams, StructuredOutput
from kvq.models.loading.tokenizer import template_source
from kvq.server.http.problems import Problem
from kvq.server.tools.format import Tool, ToolFormat
from kvq.server.tools.formats.registry import find_format
from kvq.server.tools.json_calls import PLAIN
from kvq.server.tools.parser import Parser
from kvq.server.tools.thoughts import Thinking

_MAX_FORCED_CALLS = 16  # per response; otherwise, an uncertain model might never stop
ToolChoice = Literal["none", "auto", "required"] | Tool  # a `Tool`: this tool must be called


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Tools offered by one request; provides sampling parameters for the engine, and result parsers."""

    tools: Sequence[Tool]
    format: ToolFormat
    max_calls: int | None = None
    grammar: str | None = None  # Lark grammar if a call is required
    kept_special_ids: tuple[int, ...] = ()

    def parser(self) -> Parser:
        return self.format.parser(self.tools, max_calls=self.max_calls)

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return `params`, changed to keep the markers of calls in the text and to force required calls.

        Raises:
            Problem: a call is required, but the request also constrains the text with another grammar.
        """
        structured = params.structured
        if self.grammar is not None:
            if structured is not None:
                words = "a forced tool call can't be structured output of another kind, too"
                raise Problem(400, words, param="tool_choice")
            structured = StructuredOutput(lark=self.grammar)
        return replace(params, structured=structured, kept_special_ids=self.kept_special_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCalling:
    """Format in which the served model writes tool calls and thinking, if recognized."""

    format: ToolFormat | None = None
    template: str = ""  # the model's chat template
    special: Mapping[str, int] = field(default_factory=dict)  # ids of special tokens, keyed by text
    is_guess: bool = False  # the format was detected, not configured
    thinking: Thinking | None = None  # thinking before the answer

    @classmethod
    def of(cls, tokenizer: Any, name: str, thoughts: str = "auto") -> "ToolCalling":
        """Return the `ToolCalling` of the model to which a transformers tokenizer belongs.

        `name`: a format name, "auto" or "none"; `thoughts`: likewise, for the markers of thinking.

        Raises:
            ConfigError: the format or the markers are unknown.
        """
        template = template_source(tokenizer)
        special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        thinking = Thinking.of(tokenizer, template, thoughts)
        format = find_format(name, template)
        is_guess = name == "auto"
        return cls(format=format, template=template, special=special, is_guess=is_guess, thinking=thinking)

    @property
    def description(self) -> str:
        """Name of the format and how it was determined, for the log."""
        if self.format is None:
            why = "; the model's chat template has none that is known" if self.is_guess else ""
            return f"not read{why}"
        return self.format.name + (", by the model's chat template" if self.is_guess else "")

    def offer(  # D326: with `none`, the template gets no tools
        self,
        tools: Sequence[Tool],
        *,
        choice: ToolChoice = "auto",
        parallel: bool = True,
        is_formatted: bool = False,
    ) -> Offer | None:
        """Return the offer of a request with these tools, or None if no calls are to be parsed.

        `parallel`: allow more than one call. If `choice` is a tool, that tool is called exactly once.
        `is_formatted`: the request specifies a structured output format.

        Raises:
            Problem: the tools, the choice and the output format can't be combined.
        """
        _check(tools, choice, is_formatted)
        format, special = self.format, self.special
        if not tools or choice == "none" or (choice == "auto" and format is None):
            return None
        max_calls, grammar = None if parallel else 1, None
        if choice != "auto" and (format is None or format.spelling is None):
            format = PLAIN
        assert format is not None, "forced calls have one, and others were looked for"
        if isinstance(choice, Tool):
            tools = [tool for tool in tools if tool.name == choice.name]
        if choice != "auto":
            max_calls = _MAX_FORCED_CALLS if parallel and choice == "required" else 1
            grammar = format.grammar(tools, max_calls, template=self.template, special=special)
        kept = tuple(special[marker] for marker in format.markers if marker in special)
        return Offer(tools=tools, format=format, max_calls=max_calls, grammar=grammar, kept_special_ids=kept)


def _check(tools: Sequence[Tool], choice: ToolChoice, is_formatted: bool) -> None:
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise Problem(400, "two tools have the same name", param="tools")
    if not tools and choice not in ("none", "auto"):
        raise Problem(400, "tool_choice needs tools", param="tool_choice")
    if isinstance(choice, Tool) and choice.name not in names:
        raise Problem(400, f"tool_choice names no tool of this request: {choice.name}", param="tool_choice")
    if tools and choice != "none" and is_formatted:
        raise Problem(
            400,
            "an output format (response_format) and calls exclude each other: leave out the tools, or use "
            'tool_choice "none"',
            param="response_format",
        )
