"""Fields of a request that nobody here knows: found, named, and refused where that was asked for."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError

from kvq.errors import nearest
from kvq.models.templates.forms import Forms
from kvq.server.http.body_errors import json_kind
from kvq.server.http.problems import Problem

HEADER = "x-kvq-ignored-fields"
IGNORED = "kvq_ignored"  # its value in a request's scope
ONLY_USUAL = "Ignored; a strict server takes only the default."
_MOST = 8  # that are named
_MAX_NAME = 100  # characters of one that is told
_MAX_WORD = 64  # characters of one that is compared with those that are known
_ALIKE = 0.7  # as max_token and max_tokens are, and max_tokens and tools are not
_SAME = (  # of other protocols and servers
    frozenset(("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens", "n_predict")),
    frozenset(("stop", "stop_sequences")),
    frozenset(("prompt", "input", "inputs")),
    frozenset(("stop_token_ids", "eos_token_id")),
    frozenset(("repetition_penalty", "repeat_penalty")),
)
_NO_TOOLS = ("none", {"type": "none"})  # choices that tell the model of none
_UNSAFE = re.compile(r"[^\w.$:/@+-]", re.ASCII)  # in a header or on a terminal


class Body(BaseModel):
    """What clients send. Some fields that it has not are labels: they ask for nothing, so nothing is lost."""

    LABELS: ClassVar[frozenset[str]] = frozenset()  # whatever they say
    USUAL: ClassVar[Mapping[str, Any]] = {}  # those that ask for nothing while they say what holds anyway
    NAMES: ClassVar[frozenset[str]]  # that may be given
    PARTS: ClassVar[Mapping[str, str]]  # of these, those that hold models: their attributes
    PLAIN: ClassVar[frozenset[str]]  # and the others

    @classmethod
    def __pydantic_on_complete__(cls) -> None:
        fields = cls.model_fields
        names = {field.alias or name: name for name, field in fields.items()}
        if cls.model_config.get("populate_by_name"):
            names |= {name: name for name in fields}
        cls.NAMES = frozenset(names)
        cls.PARTS = {given: name for given, name in names.items() if _holds_models(fields[name].annotation)}
        cls.PLAIN = cls.NAMES - cls.PARTS.keys()

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, make: GetJsonSchemaHandler) -> dict[str, Any]:
        made = make(core)
        told = {name: {"description": "Ignored."} for name in sorted(cls.LABELS)}
        told |= {name: {"default": usual, "description": ONLY_USUAL} for name, usual in cls.USUAL.items()}
        make.resolve_ref_schema(made)["properties"] |= told
        return made


def _holds_models(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return any(_holds_models(part) for part in get_args(annotation))


def check_usual(cls: type[Body], given: Any) -> Any:
    """Before a model with `USUAL` fields is made: other values are ignored, those of another type refused."""
    for name, usual in cls.USUAL.items():
        value = given.get(name) if isinstance(given, dict) else None
        if value is not None and type(value) is not type(usual):
            context = {"kind": json_kind(usual), "got": json_kind(value), "at": name}
            raise PydanticCustomError("usual", "Input should be {kind}, got {got}", context)
    return given


@dataclass(frozen=True, slots=True)
class Field:
    """One that was ignored."""

    path: str  # with dots
    name: str  # the last of it
    known: frozenset[str]  # that it may have meant
    is_label: bool = False  # it asks for nothing, so that nothing is lost

    def refusal(self) -> Problem:
        """What a strict server says to it."""
        message = unknown_field(self.path, self.name, self.known)
        return Problem(400, message, code="unknown_field", param=self.path[:_MAX_NAME])


def safe_name(path: str) -> str:
    """What a client called a field, for headers and terminals."""
    return _UNSAFE.sub("?", path[:_MAX_NAME]) or "?"  # a header that ends in a comma and a space is none


def unknown_field(path: str, name: str, known: Iterable[str]) -> str:
    """What is said to a field that can't be ignored; `known`: names that it may have meant."""
    hint = nearest(name, sorted(known), cutoff=_ALIKE) if len(name) <= _MAX_WORD else ""
    for same in _SAME:
        if name in same and (here := same & set(known)):
            hint = f"; did you mean {min(here)!r}?"
    return f"unknown field {path[:_MAX_NAME]!r}{hint}"


@dataclass(frozen=True, slots=True)
class Ignored:
    """What was ignored of one request."""

    fields: tuple[Field, ...] = ()  # those that may be missed first
    has_more: bool = False

    @property
    def first_unknown(self) -> Field | None:
        """The first that may be missed."""
        return next((field for field in self.fields if not field.is_label), None)

    @property
    def names(self) -> list[str]:
        """Their paths, safe to be shown; "..." last if there are more."""
        return [safe_name(field.path) for field in self.fields] + ["..."] * self.has_more

    def header(self) -> str:
        """Their names in printable ASCII, a kilobyte at most."""
        return ", ".join(self.names)


def find_ignored(given: Any, body: Body, forms: Forms | None = None) -> Ignored:
    """What of a decoded body its model has no place for, or the chat template. Null counts as left out.

    Objects that are whole a tool's or a schema's own are not looked into. Stops when enough are found, so a
    million unknown fields cost no more than a few.
    """
    unknown: list[Field] = []
    labels: list[Field] = []
    for field in chain(_walk(given, body, ""), _unread(given, type(body).NAMES, forms or Forms())):
        of_kind = labels if field.is_label else unknown
        if len(of_kind) <= _MOST:
            of_kind.append(field)
        if len(unknown) > _MOST:
            break
    fields = (*unknown, *labels)
    return Ignored(fields[:_MOST], len(fields) > _MOST)


def _unread(given: Any, taken: frozenset[str], forms: Forms) -> Iterator[Field]:
    """What is for a template that reads no such thing, of the fields that are taken."""
    fields = {name: given[name] for name in taken & given.keys() if given[name]}
    if "tools" in fields and forms.only_calls and fields.get("tool_choice") not in _NO_TOOLS:
        yield Field("tools", "tools", frozenset())
    if forms.variables is None:
        return
    if "reasoning_effort" in fields and "reasoning_effort" not in forms.variables:
        yield Field("reasoning_effort", "reasoning_effort", frozenset())
    for name, value in fields.get("chat_template_kwargs", {}).items():
        if name not in forms.variables and value is not None:
            yield Field(f"chat_template_kwargs.{name[:_MAX_NAME]}", name, forms.variables)


def _walk(given: Any, body: Body, place: str) -> Iterator[Field]:
    """`place`: where `given` is, with a dot behind it."""
    if not isinstance(given, dict):
        return
    model = type(body)
    if not (model.model_config.get("extra") == "allow" or given.keys() <= model.NAMES):
        for name, value in given.items():
            if name not in model.NAMES and value is not None:
                told = name[:_MAX_NAME]
                is_label = name in model.LABELS or (name in model.USUAL and model.USUAL[name] == value)
                yield Field(place + told, told, model.NAMES, is_label)
    for name, attribute in model.PARTS.items():
        if (value := given.get(name)) is not None:
            part = getattr(body, attribute)
            if isinstance(part, Body):
                yield from _walk(value, part, f"{place}{name}.")
            elif isinstance(part, list) and isinstance(value, list):
                for i, (one, item) in enumerate(zip(value, part, strict=False)):
                    if isinstance(item, Body) and not one.keys() <= item.PLAIN:
                        yield from _walk(one, item, f"{place}{name}.{i}.")
