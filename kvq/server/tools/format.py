"""What is known about a format of tool calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvq.server.tools.output import Output, call_id
from kvq.server.tools.source import Source, Steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON schema of the arguments, an object


@dataclass(frozen=True, kw_only=True, slots=True)
class Wording:
    """What a model's tokenizer and template say about how it spells calls."""

    template: str = ""
    special: Mapping[str, int] = field(default_factory=dict)  # special tokens by their text


Machine = Callable[[Source, Output, Sequence[Tool]], Steps[None]]
Grammar = Callable[[Sequence[Tool], Wording, int], str]  # tools, how they are spelled, calls at most


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """How a family of models writes calls.

    `machine` reads a whole answer. `markers` are the words it looks for, which are special tokens in
    many vocabularies. `grammar` is Lark for an answer of calls and nothing else; None has forced calls
    written as plain JSON. `is_text_template`: the family's templates join the arguments as text, and
    take None for no content.
    """

    name: str
    machine: Machine
    is_template: Callable[[str], bool]  # whether a chat template speaks this format
    markers: tuple[str, ...] = ()
    grammar: Grammar | None = None
    new_id: Callable[[], str] = call_id
    is_text_template: bool = False
