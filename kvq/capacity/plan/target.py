"""Model to plan for: its shape, its weight size, and its split over GPUs.

The shape is read from a model folder, a GGUF file or the catalogue.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvq.capacity.plan.catalogue import find_model, known_models
from kvq.errors import ConfigError
from kvq.formats.checkpoints import with_modelopt_config
from kvq.formats.checkpoints.stored import NF4
from kvq.geometry import ModelGeometry, parse_geometry
from kvq.geometry.support import text_config, why_refused
from kvq.models.gguf.files import read_gguf
from kvq.sizing.held import AUTO, PLAIN, HeldAs, held_as, held_in_blocks
from kvq.sizing.memory import Split, Term, on_one_gpu, weight_terms
from kvq.sizing.parameters import ModelShape, Parameters, count_parameters

_log = logging.getLogger("kvq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:  # D279: models and requests are separate values
    """One model, with its weights and its split over GPUs."""

    name: str
    geometry: ModelGeometry
    parameters: Parameters | None = None  # None: `weight_bytes` replaces them
    held: HeldAs = field(default_factory=HeldAs)
    weight_bytes: int | None = None  # of the entire model, instead of a calculated size
    split: Split = field(default_factory=Split)
    refused: str | None = None  # why kvq's engine does not run it

    def formats(self, kv: Iterable[str]) -> list[str]:
        """Return the KV formats without duplicates, with `auto` replaced by the model's compute dtype."""
        return list(dict.fromkeys(self.held.other.name if name == "auto" else name for name in kv))

    def terms(self) -> tuple[Term, ...]:
        """Return the weight terms of the fullest GPU."""
        if self.weight_bytes is not None:
            terms: tuple[Term, ...] = (Term(name="weights", nbytes=self.weight_bytes, formula="as given"),)
        elif self.parameters is not None:
            terms = weight_terms(self.parameters, self.held)
        else:
            raise ConfigError(f"{self.name}: neither parameters nor bytes of the weights are known")
        return on_one_gpu(terms, self.geometry, self.split)


def make_target(
    model: str | Path,
    *,
    weights: str = AUTO,
    weight_bytes: int | None = None,
    split: Split | None = None,
    shape: ModelShape | None = None,
    max_context: int | None = None,
) -> Target:
    """Return the target for a model name, folder or GGUF file.

    `weights`: format of linear layers; "auto": as they are stored. `shape`: model shape, if config.json does
    not determine it. `max_context`: engine's maximum.

    Raises:
        ConfigError: the model is unknown, or its weights can't be counted.
    """
    found = shape or _shape(model, counted=weight_bytes is None)
    held = held_as(found.config, weights)
    if weights == AUTO and Path(model).is_file():
        held = held_in_blocks(read_gguf(Path(model)).types, held.other, on_gpu=True)
    if held.unknown is not None and weight_bytes is None:
        _log.warning(
            "what quant_method %r makes of weights is not known: they are counted in %s; --weights names the "
            "nearest format, such as int4",
            *(held.unknown, held.other.name),
        )
    refused = found.refused or why_refused(found.config, max_context=max_context) or held.unread
    is_quantized = found.config.get("quantization_config") is not None
    if not refused and is_quantized and weights not in (AUTO, NF4.name, *PLAIN):
        refused = "its weights are quantized already, and kvq rounds none of these (--weights)"
    return Target(
        name=str(model),
        geometry=found.geometry,
        parameters=None if weight_bytes is not None else found.parameters,
        held=held,
        weight_bytes=weight_bytes,
        split=split or Split(),
        refused=refused,
    )


def _shape(model: str | Path, *, counted: bool) -> ModelShape:
    """Return the shape of a model folder or file (a Path or a str) or of a model in the catalogue."""
    if isinstance(model, str) and (
        model.lower() in known_models() or not (Path(model, "config.json").is_file() or Path(model).is_file())
    ):
        found = find_model(model)
        if Path(model).is_dir():
            _log.warning(
                "%r is a model of `kvq models`; for the folder of that name write ./%s", model, model
            )
        return ModelShape(
            config=found.config,
            geometry=found.geometry,
            parameters=found.parameters if counted else None,
            refused=found.refused,
        )
    config = read_config(Path(model))
    geometry = parse_geometry(config)
    return ModelShape(
        config=config, geometry=geometry, parameters=count_parameters(config, geometry) if counted else None
    )


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read a folder's config.json, including ModelOpt's quantization; for multimodal models, the text part.

    `folder` may also be a GGUF file.

    Raises:
        ConfigError: the file can't be read.
        ModelError: the GGUF file is damaged, or kvq doesn't read its architecture.
    """
    if folder.is_file():
        return read_gguf(folder).config
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold an object, got a {type(config).__name__}")
    config, text = with_modelopt_config(folder, config), config.get("text_config")
    return text_config(config) or ({**config, **text} if isinstance(text, dict) else config)
