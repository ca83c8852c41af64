"""Model catalogue: the facts in published config.json files that determine memory use.

Most shapes are derived from these facts, as for a model folder. If a family's layers differ in more than
their windows, the shape computed by transformers is stored as well; tools/model_catalogue.py writes it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from kvq.errors import ConfigError, nearest
from kvq.geometry import LayerGeometry, ModelGeometry, StateGeometry, StateTensor, parse_geometry
from kvq.sizing.parameters import Parameters, count_parameters

CATALOGUE = Path(__file__).with_name("models.json")
OF_A_LAYER = ("kv_heads", "k_head_dim", "v_head_dim", "window", "is_latent")  # D276


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """One model of the catalogue."""

    name: str
    model: str  # its repository on the Hugging Face hub
    source: str  # URL from which the facts were read
    read: str  # date of reading, YYYY-MM-DD
    note: str | None = None  # present if the source is not the model's own config.json
    published: int | None = None  # exact number of parameters, if published
    refused: str | None = None  # why kvq's engine does not run it
    config: Mapping[str, Any]
    shape: Mapping[str, Any] | None = None  # None: derived from the config
    counted: Mapping[str, int] | None = None  # parameters by kind; None: derived from the config

    @cached_property
    def geometry(self) -> ModelGeometry:
        """Geometry of the model's layers."""
        return parse_geometry(self.config) if self.shape is None else decode_shape(self.shape)

    @cached_property
    def parameters(self) -> Parameters:
        """Parameter counts by kind."""
        if self.counted is not None:
            return Parameters(matrices=(), **self.counted)
        return count_parameters(self.config, self.geometry)


@cache
def known_models() -> Mapping[str, KnownModel]:
    """Return the models in the catalogue, keyed by name."""
    data = json.loads(CATALOGUE.read_text(encoding="utf8"))
    return {name: KnownModel(name=name, **facts) for name, facts in data["models"].items()}


def _found(name: str) -> KnownModel | None:
    known, lower = known_models(), name.lower()
    return known.get(lower) or next((one for one in known.values() if one.model.lower() == lower), None)


def is_known(name: str) -> bool:
    """Return True if `name` is the catalogue name or hub repository of a known model."""
    return _found(name) is not None


def find_model(name: str) -> KnownModel:
    """Return the model with this catalogue name or hub repository.

    Raises:
        ConfigError: no model has this name; the message suggests the nearest one.
    """
    if (found := _found(name)) is None:
        near = nearest(name, list(known_models()))
        raise ConfigError(f"no model {name!r} is known{near or ';'} see kvq models")
    return found


def decode_shape(shape: Mapping[str, Any]) -> ModelGeometry:
    """Decode a geometry from the catalogue, which stores equal layers once, with a list of their numbers."""
    places: dict[int, dict[str, Any]] = {}
    for entry in shape["layers"]:
        own = {key: entry[key] for key in OF_A_LAYER if key in entry}
        for number in entry["at"]:
            readers = entry.get("readers", {}).get(str(number), ())
            places[number] = {**own, "number": number, "readers": tuple(readers)}
    states = {
        number: StateGeometry(
            number=number,
            kind=entry["kind"],
            tensors=tuple(
                StateTensor(name=name, index=index, shape=tuple(dims), dtype=dtype)
                for name, index, dims, dtype in entry["tensors"]
            ),
        )
        for entry in shape.get("states", ())
        for number in entry["at"]
    }
    whole = {name: value for name, value in shape.items() if name not in ("layers", "states")}
    return ModelGeometry(
        **whole,
        layers=tuple(LayerGeometry(index=i, **places[number]) for i, number in enumerate(sorted(places))),
        states=tuple(states[number] for number in sorted(states)),
    )
