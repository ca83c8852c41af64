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

    With `calibrate_on_load`, a static format (`fp8_per_head`, `int8_per_head`) gets its scales
    from a run over the default calibration text, in memory only.

    Raises:
        ModelError: missing, damaged or refused model.
        ConfigError: an option that can't be used as given, or a static format without scales.
    """
    model = load_model(path_or_name, kv, **options)
    if options.get("scales") is not None and (calibrate_on_load or not model.recipe.is_static):
        why = "calibrate_on_load makes its own" if calibrate_on_load else f"{model.recipe.name} uses none"
        raise ConfigError(f"static scales {options['scales']} were given, but {why}; drop one of the two")
    if calibrate_on_load and model.recipe.is_static:
        return with_fresh_scales(model)
    model.check_scales()
    return model


def with_fresh_scales(model: Model, **options: Any) -> Model:
    """The same model with static scales observed now on the default calibration text."""
    return model.with_static_scales(calibrate(model, calibration_text(), **options))


def perplexity(
    model: str | Path | Model, kv: list[str | KVRecipe], text: str | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Measure KV formats on a text; rows have the keys of `kvq perplexity --json`.

    `model`: a loaded model, or what `load` takes. `text` defaults to held-out help topics of
    CPython. Options are those of `kvq.evals.measure_perplexity`.
    """
    loaded = model if isinstance(model, Model) else load(model)
    return [asdict(row) for row in measure_perplexity(loaded, kv, text or default_text().text, **options)]
