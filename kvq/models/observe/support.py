"""Checks of whether a model is supported, from its config.json and transformers' code alone.

Reasons for refusals are in kvq.geometry.support.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq.errors import ConfigError
from kvq.geometry import FAMILIES, ModelGeometry, parse_geometry
from kvq.geometry.support import why_refused
from kvq.models.observe.geometry import observed_geometry, refusal


def is_listed(geometry: ModelGeometry) -> bool:
    """Return True if a model's family is on the list of checked families; others must be proven."""
    return geometry.model_type in FAMILIES


def check_supported(config: Mapping[str, Any], *, max_context: int | None, folder: Path) -> ModelGeometry:
    """Return the geometry of the model that a config.json's dict describes, if kvq supports it.

    Raises:
        ModelError: the model is not supported; the message names it and says why.
    """
    kind = config.get("model_type")
    if why := why_refused(config, max_context=max_context):
        raise refusal(kind, why)
    if kind not in FAMILIES:
        return observed_geometry(config, folder)
    try:
        return parse_geometry(config)
    except ConfigError as error:
        raise refusal(kind, str(error)) from error
