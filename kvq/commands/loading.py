"""Loading a model the way the shared options ask for."""

from kvq.api import with_fresh_scales
from kvq.commands.options import ModelOptions
from kvq.commands.progress import progress_bar, status
from kvq.errors import ConfigError
from kvq.models import Model
from kvq.models.model import load, resolve_recipe


def load_for(options: ModelOptions, kv: list[str]) -> Model:
    """Load the model, with static scales if one of the formats needs them.

    Raises:
        ConfigError: scales that nothing uses, or that two options would make.
    """
    with status(f"loading {options.model}"):
        model = load(options.model, **options.load_options())
        recipes = [resolve_recipe(model.weights, name) for name in kv]
    needed = any(recipe.is_static for recipe in recipes)
    if options.calibrate_on_load and not needed:
        raise ConfigError(f"--calibrate-on-load was given, but {', '.join(kv)} use no static scales; drop it")
    if options.scales and not needed:
        raise ConfigError(
            f"--scales {options.scales} was given, but {', '.join(kv)} use no static scales; drop it"
        )
    if options.scales and options.calibrate_on_load:
        raise ConfigError("--calibrate-on-load makes static scales and --scales names some; give one of them")
    if options.calibrate_on_load:
        with progress_bar("calibrating") as progress:
            model = with_fresh_scales(model, progress=progress)
    for name in kv:
        model.with_kv(name)  # every format is checked before long work starts
    return model
