"""What of a model decides about memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvq.geometry import ModelGeometry
from kvq.sizing.parameters import Parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Of one model, as its config.json or its code has it."""

    config: Mapping[str, Any]
    geometry: ModelGeometry
    parameters: Parameters | None  # None: nobody asked
    refused: str | None = None  # why kvq's engine does not run it
