"""`kvq.plan`: a plan in one call."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq.arguments import checked
from kvq.capacity.plan.gpus import Gpu, find_gpu
from kvq.capacity.plan.known import find_model, known_models
from kvq.capacity.plan.latent import latent_values
from kvq.capacity.plan.lengths import Length, fixed
from kvq.capacity.plan.plan import CapacityPlan, Engine, Target, make_plan
from kvq.errors import ConfigError
from kvq.geometry import parse_geometry
from kvq.sizing.held import AUTO, held_as
from kvq.sizing.memory import Split
from kvq.sizing.parameters import count_parameters

_log = logging.getLogger("kvq")


@checked
def plan(
    model: str | Path,
    *,
    gpu: str | Gpu,
    kv: str = "int4",
    context: int | None = None,
    output: int | None = None,
    lengths: Sequence[Length] | None = None,
    weights: str = AUTO,
    weight_bytes: int | None = None,
    split: Split | None = None,
    engine: Engine | None = None,
    prefix_share: float = 0.0,
) -> CapacityPlan:
    """How many requests of `context` tokens, or of these `lengths`, fit on a GPU.

    `model`: a name of `kvq models`, or a folder with a config.json. `output`: of the context, an eighth
    unless said. `weights`: the format of the linear layers, by default what the config says of
    the checkpoint's; `weight_bytes` replaces the count.

    Raises:
        ConfigError: something unknown, no lengths, or the model doesn't fit, with by how much.
    """
    target = make_target(model, weights=weights, weight_bytes=weight_bytes, split=split or Split())
    if (context is None) == (lengths is None):
        raise ConfigError("how long requests are decides how many fit: give either context or lengths")
    drawn = list(lengths or ()) or fixed_context(target, context or 0, output)
    return make_plan(
        target,
        gpu if isinstance(gpu, Gpu) else find_gpu(gpu),
        kv,
        drawn,
        slot_tokens=max(length.total for length in drawn),
        engine=engine,
        prefix_share=prefix_share,
    )


def make_target(model: str | Path, *, weights: str, weight_bytes: int | None, split: Split) -> Target:
    """A model by its name or folder.

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
        split=split,
        latent_values=latent_values(config, geometry),
    )


def fixed_context(target: Target, context: int, output: int | None) -> list[Length]:
    """Requests of one length, within the model's context.

    Raises:
        ConfigError: it is longer.
    """
    most = target.geometry.max_context
    if context > most:
        raise ConfigError(f"a context of {context} tokens is above the model's {most}")
    return fixed(context, output or context // 8)


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
