"""Unknown request fields: listed in a response header, or refused if the server is strict."""

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

HEADER = "x-kvq-ignored-fields"  # D321: ignored fields: named in a header and counted
IGNORED = "kvq_ignored"  # scope key of the header's value
ONLY_USUAL = "Ignored; a strict server takes only the default."
_MOST = 8  # maximum number of fields listed
_MOST_KNOWN = 3  # maximum number of known fields that a refusal lists
_MAX_NAME = 100  # maximum length of a name in a response, in characters
_MAX_WORD = 64  # maximum length of a name that is compared with known names
_ALIKE = 0.7  # so that max_token matches max_tokens, and tools does not
_SAME = (  # groups of names for one field in various protocols and servers
    frozenset(("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens", "n_predict")),
    frozenset(("stop", "stop_sequences")),
    frozenset(("prompt", "input", "inputs")),
    frozenset(("stop_token_ids", "eos_token_id")),
    frozenset(("repetition_penalty", "repeat_penalty")),
)
_NO_TOOLS = ("none", {"type": "none"})  # choices with which the model sees no tools
_EFFORTS = {"reasoning_effort", "enable_thinking"}  # of templates that read `reasoning.effort`
_UNSAFE = re.compile(r"[^\w.$:/@+-]", re.ASCII)  # characters that are unsafe in a header or on a terminal


class Body(BaseModel):
    """Request body. Some unknown fields are labels: they have no effect, so ignoring them is harmless."""

    LABELS: ClassVar[frozenset[str]] = frozenset()  # labels, whatever their value
    USUAL: ClassVar[Mapping[str, Any]] = {}  # fields that are labels only with this value, the default
    NAMES: ClassVar[frozenset[str]]  # names of known fields
    PARTS: ClassVar[Mapping[str, str]]  # attributes of fields that contain models, keyed by field name
    PLAIN: ClassVar[frozenset[str]]  # names of the other fields

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
        others = {name: {"description": "Ignored."} for name in sorted(cls.LABELS)}
        others |= {name: {"default": usual, "description": ONLY_USUAL} for name, usual in cls.USUAL.items()}
        make.resolve_ref_schema(made)["properties"] |= others
        return made


def _holds_models(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return any(_holds_models(part) for part in get_args(annotation))


def check_usual(cls: type[Body], given: Any) -> Any:  # D322: labels pass: the answer is the same without them
    """Refuse `USUAL` fields with a value of the wrong type, before validation; ignore other values."""
    for name, usual in cls.USUAL.items():
        value = given.get(name) if isinstance(given, dict) else None
        if value is not None and type(value) is not type(usual):
            context = {"kind": json_kind(usual), "got": json_kind(value), "at": name}
            raise PydanticCustomError("usual", "Input should be {kind}, got {got}", context)
    return given


@dataclass(frozen=True, slots=True)
class _Field:
    """Ignored field of a request."""

    path: str  # dotted path
    name: str  # last component of the path
    known: frozenset[str]  # names that the client may have meant
    is_label: bool = False  # the field has no effect, so ignoring it is harmless

    def refusal(self) -> Problem:
        message = unknown_field(self.path, self.name, self.known)
        return Problem(400, message, code="unknown_field", param=self.path[:_MAX_NAME])


def safe_name(path: str) -> str:
    """Return a field name from a client, sanitized for headers and terminals."""
    return _UNSAFE.sub("?", path[:_MAX_NAME]) or "?"  # a header can't end in a comma and a space


def unknown_field(path: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for a field that can't be ignored; `known`: names that may have been meant."""
    hint = nearest(name, sorted(known), cutoff=_ALIKE) if len(name) <= _MAX_WORD else ""
    for same in _SAME:
        if name in same and (here := same & set(known)):
            hint = f"; did you mean {min(here)!r}?"
    if not hint and 0 < len(all_known := sorted(known)) <= _MOST_KNOWN:
        hint = f"; known are {', '.join(all_known)}"
    return f"unknown field {path[:_MAX_NAME]!r}{hint}"


def find_ignored(given: Any, body: Body, forms: Forms | None = None) -> tuple[list[str], _Field | None]:
    """Find the fields of a decoded body that neither the body's model nor the chat template reads.

    Return the paths of these fields (sanitized, at most a kilobyte, labels last, with "..." if there are
    more), and the first field that is not a label.

    Null is treated as absent. The contents of tools and schemas are not searched. The search stops once
    enough fields are found, so a million unknown fields cost no more than a few.
    """
    unknown: list[_Field] = []
    labels: list[_Field] = []
    for field in chain(_walk(given, body, ""), _unread(given, type(body).NAMES, forms or Forms())):
        of_kind = labels if field.is_label else unknown
        if len(of_kind) <= _MOST:
            of_kind.append(field)
        if len(unknown) > _MOST:
            break
    names = [safe_name(field.path) for field in (*unknown, *labels)]
    return names[:_MOST] + ["..."] * (len(names) > _MOST), unknown[0] if unknown else None


def _unread(given: Any, taken: frozenset[str], forms: Forms) -> Iterator[_Field]:
    """Yield the fields intended for the chat template that the template does not read."""
    fields = {name: given[name] for name in taken & given.keys() if given[name]}
    if "tools" in fields and forms.only_calls and fields.get("tool_choice") not in _NO_TOOLS:
        yield _Field("tools", "tools", frozenset())
    if forms.variables is None:
        return
    if "reasoning_effort" in fields and "reasoning_effort" not in forms.variables:
        yield _Field("reasoning_effort", "reasoning_effort", frozenset())
    if fields.get("reasoning", {}).get("effort") and not _EFFORTS & forms.variables:
        yield _Field("reasoning.effort", "effort", frozenset())
    for name, value in fields.get("chat_template_kwargs", {}).items():
        if name not in forms.variables and value is not None:
            yield _Field(f"chat_template_kwargs.{name[:_MAX_NAME]}", name, forms.variables)


def _walk(given: Any, body: Body, place: str) -> Iterator[_Field]:
    """Yield the unknown fields of `given`; `place` is the path of `given`, with a trailing dot."""
    if not isinstance(given, dict):
        return
    model = type(body)
    if not (model.model_config.get("extra") == "allow" or given.keys() <= model.NAMES):
        for name, value in given.items():
            if name not in model.NAMES and value is not None:
                shown = name[:_MAX_NAME]
                is_label = name in model.LABELS or (name in model.USUAL and model.USUAL[name] == value)
                yield _Field(place + shown, shown, model.NAMES, is_label)
    for name, attribute in model.PARTS.items():
        if (value := given.get(name)) is not None:
            part = getattr(body, attribute)
            if isinstance(part, Body):
                yield from _walk(value, part, f"{place}{name}.")
            elif isinstance(part, list) and isinstance(value, list):
                for i, (one, item) in enumerate(zip(value, part, strict=False)):
                    if isinstance(item, Body) and not one.keys() <= item.PLAIN:
                        yield from _walk(one, item, f"{place}{name}.{i}.")
