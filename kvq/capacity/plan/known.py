"""Models that kvq knows the shape of without their files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvq.errors import ConfigError, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """What of a published config.json decides about memory."""

    name: str
    source: str  # the repository whose config.json it is; docs/capacity.md says what it was compared with
    parameters: int | None  # published with it; None: only together with a vision tower, or not at all
    config: Mapping[str, Any]


@cache
def known_models() -> Mapping[str, KnownModel]:
    """By name."""
    data = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf8"))
    return {name: KnownModel(name=name, **facts) for name, facts in data["models"].items()}


def find_model(name: str) -> KnownModel:
    """A model by its name.

    Raises:
        ConfigError: none has it; the message has the nearest one.
    """
    known = known_models()
    found = known.get(name.lower())
    if found is None:
        raise ConfigError(f"no model {name!r} is known{nearest(name, list(known)) or ';'} see kvq models")
    return found
