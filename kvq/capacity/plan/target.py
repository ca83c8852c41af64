"""A model as it shall be served: its shape, what its weights take, and over how many GPUs it is spread.

Its config is a folder's, or one of the published ones in models.json.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kvq.capacity.plan.users import latent_values
from kvq.errors import ConfigError, nearest
from kvq.geometry import ModelGeometry, parse_geometry
from kvq.sizing.held import AUTO, HeldAs, held_as
from kvq.sizing.memory import Split, Term, on_one_gpu, weight_terms
from kvq.sizing.parameters import Parameters, count_parameters


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


_log = logging.getLogger("kvq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One model."""

    name: str
    geometry: ModelGeometry
    parameters: Parameters | None = None  # None: `weight_bytes` says it
    held: HeldAs = field(default_factory=lambda: HeldAs(linear="fp16"))
    weight_bytes: int | None = None  # of the whole model, instead of counting them
    split: Split = field(default_factory=Split)
    latent_values: int | None = None  # of a token and layer, where attention is latent

    def terms(self) -> tuple[Term, ...]:
        """The weights of the fullest GPU."""
        if self.weight_bytes is not None:
            terms: tuple[Term, ...] = (Term(name="weights", nbytes=self.weight_bytes, formula="as given"),)
        elif self.parameters is not None:
            terms = weight_terms(self.parameters, self.held)
        else:
            raise ConfigError(f"{self.name}: neither parameters nor bytes of the weights are known")
        return on_one_gpu(terms, self.geometry, self.split)


def make_target(
    model: str | Path, *, weights: str = AUTO, weight_bytes: int | None = None, split: Split | None = None
) -> Target:
    """A model by its name or folder. `weights`: the format of Linear layers, else what the config says.

    Raises:
        ConfigError: neither is known, or its weights can't be counted.
    """
    config = _config(model)
    geometry = parse_geometry(config)
    return Target(
        name=str(model),
        geometry=geometry,
        parameters=None if weight_bytes is not None else count_parameters(config, geometry),
        held=held_as(config, weights),
        weight_bytes=weight_bytes,
        split=split or Split(),
        latent_values=latent_values(config, geometry),
    )


def _config(model: str | Path) -> Mapping[str, Any]:
    """Of a folder, which a Path always is and a text may be; else of a model that is known by name."""
    if isinstance(model, str) and (
        model.lower() in known_models() or not Path(model, "config.json").is_file()
    ):
        found = find_model(model)
        if Path(model).is_dir():
            _log.warning(
                "%r is a model of `kvq models`; for the folder of that name write ./%s", model, model
            )
        return found.config
    path = Path(model) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold an object, got a {type(config).__name__}")
    text = config.get("text_config")  # of a model that sees or hears too
    return {**config, **text} if isinstance(text, dict) else config
