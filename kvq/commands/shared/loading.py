"""Model loading with the shared options, all of which are checked before weights are loaded."""

from dataclasses import dataclass

from kvq.api import with_fresh_scales
from kvq.commands.shared.options import ModelOptions
from kvq.commands.shared.progress import progress_bar, status
from kvq.commands.shared.terminal import echo, say_model
from kvq.errors import ConfigError, UnfitFormat
from kvq.formats import KVRecipe, StaticScales
from kvq.models import Model
from kvq.models.check.load_check import check_on_load, refuse_known
from kvq.models.loading.prepared import PreparedModel, find_scales, prepare
from kvq.models.loading.tokenizer import check_knows_text
from kvq.models.model import load_prepared


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedModel:
    """Model that passed all checks before loading, and the formats that fit."""

    prepared: PreparedModel
    kv: list[str]  # the formats that fit, in the original order
    refused: dict[str, str]  # formats that do not fit -> reason
    scales: StaticScales | None
    calibrates: bool

    def recipe(self, name: str) -> KVRecipe:
        """Return the recipe of a format that fits."""
        return self.prepared.recipe(name, self.scales)

    def load(self) -> Model:
        """Load the weights, and print the model's source and digest.

        Raises:
            ModelError: the weights are damaged, or the model would run incorrectly.
        """
        model = load_checked(self.prepared, self.scales)
        if self.calibrates:
            with progress_bar("calibrating") as progress:
                model = with_fresh_scales(model, progress=progress)
        return model


def load_to_serve(checked: CheckedModel, kv: str, *, accept_divergence: bool) -> Model:
    """Load the weights, and check the quality cost of the format; see `kvq.models.check.load_check`.

    Raises:
        ModelError: the weights are damaged, or the model would run incorrectly.
        BrokenFormat: the format breaks the model, and `accept_divergence` is False.
    """
    refuse_known(checked.prepared, checked.recipe(kv), accept_divergence=accept_divergence)
    model = checked.load().with_kv(kv)
    with status(f"checking {kv} on {checked.prepared.source}"):
        check_on_load(model, accept_divergence=accept_divergence)
    return model


def check_for(options: ModelOptions, kv: list[str]) -> CheckedModel:
    """Check the model, its options and every format without loading weights.

    Formats that do not fit the head dimensions are reported and omitted if other formats fit.

    Raises:
        ModelError: the model is missing, damaged or not supported.
        ConfigError: an option, a format or scales can't be used, or no format fits.
        UnsupportedKernel: the chosen backend has no kernel for a format.
    """
    with status(f"checking {options.model}"):
        prepared = prepare(options.model, **options.load_options())
        check_knows_text(prepared.tokenizer, prepared.folder)
        if options.scales and options.calibrate_on_load:
            raise ConfigError(
                "--calibrate-on-load makes static scales and --scales names some; give one of them"
            )
        scales = find_scales(prepared, options.scales)
        recipes: list[tuple[str, KVRecipe]] = []
        refused: dict[str, UnfitFormat] = {}
        for name in kv:
            try:
                recipes.append((name, prepared.recipe(name, scales)))
            except UnfitFormat as unfit:
                refused[name] = unfit
        if not recipes:
            raise next(iter(refused.values()))
        _check_scales_are_used(options, recipes)
        for _, recipe in recipes:
            if options.calibrate_on_load and recipe.is_static:
                continue  # its scales are observed after loading
            prepared.check_scales(recipe)
            prepared.check_kernels(recipe)
    for name, error in refused.items():
        echo(f"kvq: left out: {name} does not fit this model: {error}", err=True)
    return CheckedModel(
        prepared=prepared,
        kv=[name for name, _ in recipes],
        refused={name: str(error) for name, error in refused.items()},
        scales=scales,
        calibrates=options.calibrate_on_load,
    )


def load_checked(prepared: PreparedModel, scales: StaticScales | None) -> Model:
    """Load the weights of a checked model, and print the model's source and digest.

    Raises:
        ModelError: the weights are damaged, or the model would run incorrectly.
    """
    with status(f"loading {prepared.source}"):
        model = load_prepared(prepared, prepared.recipe("auto"), scales)
        digest = model.weights.digest
    say_model(prepared.source, digest)
    return model


def _check_scales_are_used(options: ModelOptions, recipes: list[tuple[str, KVRecipe]]) -> None:
    given = "--calibrate-on-load" if options.calibrate_on_load else f"--scales {options.scales}"
    wanted = options.calibrate_on_load or options.scales
    if wanted and not any(recipe.is_static for _, recipe in recipes):
        names = ", ".join(name for name, _ in recipes)
        raise ConfigError(f"{given} was given, but {names} use no static scales; drop it")
