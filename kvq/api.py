"""What `import kvq` offers: loading with calibration, and measuring with plain rows."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvq.calib import calibrate
from kvq.errors import ConfigError
from kvq.evals import calibration_text, default_text, measure_perplexity
from kvq.formats import KVRecipe
from kvq.models import Model
from kvq.models import load as load_model


def load(
    path_or_name: str | Path, kv: str | KVRecipe = "auto", *, calibrate_on_load: bool = False, **options: Any
) -> Model:
    """Load a model and choose its KV format; see `kvq.models.load` for the options.

    With `calibrate_on_load`, static formats (`fp8_per_head`, `int8_per_head`), this one or those of
    `with_kv`, get their scales from a run over the default calibration text, in memory only.

    Raises:
        ModelError: missing, damaged or refused model.
        ConfigError: an option that can't be used as given, or a static format without scales.
    """
    model = load_model(path_or_name, kv, **options)
    scales = options.get("scales")
    if scales is not None and calibrate_on_load:
        raise ConfigError(f"calibrate_on_load makes static scales and {scales} holds some; give one of them")
    if (scales is not None or calibrate_on_load) and kv != "auto" and not model.recipe.is_static:
        raise ConfigError(f"static scales were asked for, but {model.recipe.name} uses none; drop them")
    if calibrate_on_load:
        return with_fresh_scales(model)
    model.check_scales()
    return model


def with_fresh_scales(model: Model, **options: Any) -> Model:
    """The same model with static scales observed now on the default calibration text."""
    return model.with_static_scales(calibrate(model, calibration_text(), **options))


def perplexity(
    model: str | Path | Model, kv: str | list[str | KVRecipe], text: str | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Measure KV formats on a text; rows have the keys of `kvq perplexity --json`.

    `model`: a loaded model, or what `load` takes. `text` defaults to held-out help topics of
    CPython. Options are those of `kvq.evals.measure_perplexity`.
    """
    loaded = model if isinstance(model, Model) else load(model)
    return [
        asdict(row)
        for row in measure_perplexity(loaded, kv, default_text().text if text is None else text, **options)
    ]
