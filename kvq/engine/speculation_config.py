"""Speculation configuration: how tokens are drafted."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from kvq.errors import ConfigError, nearest
from kvq.scheduler.draft_depth import MOST_DRAFTS

Method = Literal["ngram", "draft", "self", "heads"]
METHODS: tuple[Method, ...] = get_args(Method)
_DEFAULT_DRAFTS = 4
_SPELLING = "off, ngram, self, heads, or draft,model=FOLDER, each with ,k=4 if that is not the default"


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """Drafting method and its limits.

    `method`: "ngram" finds an earlier occurrence of the last tokens in the request's text or in its tenant's
    recent outputs, and proposes the tokens that followed; "draft" runs a smaller model with the same
    vocabulary; "self" runs the model itself with rounded weights, on its own cache; "heads" runs the
    multi-token-prediction layers of the model's checkpoint. `k`: maximum number of drafts per sequence and
    step; fewer are made if fewer pay off.
    """

    method: Method
    k: int = _DEFAULT_DRAFTS
    model: str | Path | None = None  # for "draft": a folder or a name, as for an engine
    kv: str | None = None  # for "draft": the format of its cache; default: its own dtype
    weights: str | None = None  # for "draft" and "self": format of rounded Linear layers; "self": int4
    adapts: bool = True  # False: always k drafts, regardless of their cost

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            hint = nearest(str(self.method), METHODS) or ";"
            raise ConfigError(f"speculation has no method {self.method!r}{hint} write {_SPELLING}")
        if not isinstance(self.k, int) or isinstance(self.k, bool) or not 1 <= self.k <= MOST_DRAFTS:
            raise ConfigError(f"speculation's k must be a whole number of 1 to {MOST_DRAFTS}, got {self.k!r}")
        if not isinstance(self.adapts, bool):
            raise ConfigError(f"speculation's adapts must be True or False, got {self.adapts!r}")
        for name, methods in (("model", ("draft",)), ("kv", ("draft",)), ("weights", ("draft", "self"))):
            if getattr(self, name) is not None and self.method not in methods:
                raise ConfigError(
                    f"speculation's {name} is of method {' and '.join(methods)}, not of {self.method}; "
                    f"leave it out"
                )
        if self.method == "draft" and self.model is None:
            raise ConfigError("speculation by a draft model needs one: draft,model=FOLDER")


def parse_speculation(given: "str | Mapping[str, Any] | Speculation | None") -> Speculation | None:
    """Read `{"method": "ngram", "k": 4}`, its JSON, or `ngram,k=4`; None, "" and "off" mean no drafts.

    Raises:
        ConfigError: the method or a key is unknown, or a value is out of range.
    """
    if given is None or isinstance(given, Speculation):
        return given
    values = _spelled(given) if isinstance(given, str) else given
    if not isinstance(values, Mapping):
        raise ConfigError(f"speculation must be a mapping or a text, got {given!r:.100}; write {_SPELLING}")
    if not values:
        return None
    known = [field.name for field in fields(Speculation)]
    for name in values:
        if name not in known:
            raise ConfigError(f"speculation has no {name!r}{nearest(str(name), known) or ';'} known: {known}")
    if "method" not in values:
        raise ConfigError(f"speculation needs a method; write {_SPELLING}")
    return Speculation(**values)


def _spelled(text: str) -> Any:
    text = text.strip()
    if text in ("", "off", "none"):
        return {}
    if text.startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"speculation is no JSON: {error}; or write {_SPELLING}") from None
    method, *rest = (part.strip() for part in text.split(","))
    values: dict[str, Any] = {"method": method}
    for part in rest:
        name, equals, value = part.partition("=")
        if not equals or name == "method":
            raise ConfigError(f"speculation {text!r} has {part!r}, which is no name=value; write {_SPELLING}")
        if name in values:
            raise ConfigError(f"speculation {text!r} names {name} twice; write {_SPELLING}")
        values[name] = _value(name, value)
    return values


def _value(name: str, text: str) -> Any:
    if name == "k":
        return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else text
    if name == "adapts":
        return {"true": True, "false": False}.get(text.lower(), text)
    return text
