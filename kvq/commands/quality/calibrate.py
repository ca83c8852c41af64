"""`kvq calibrate`: static scales and centers from a model's own K and V, written to kvq.json."""

import dataclasses
import sys
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.shared.declare import gathered, option, path_option, picked
from kvq.commands.shared.options import REVISION, TOKEN, kv_option, model_argument, text_options
from kvq.commands.shared.param_types import TO_READ, TO_WRITE, TOKENS
from kvq.commands.shared.progress import progress_bar
from kvq.commands.shared.results import begin, write_rows
from kvq.commands.shared.terminal import echo, warn
from kvq.errors import ConfigError
from kvq.formats import Grouped, KVRecipe

if TYPE_CHECKING:
    from kvq.calib import Observations
    from kvq.evals import EvalText
    from kvq.models import Model
    from kvq.models.loading.prepared import PreparedModel

_FEW_TOKENS = 256  # with fewer tokens, single tokens determine maxima and means


@dataclass(frozen=True, kw_only=True, slots=True)
class _CalibrateOptions:
    text: str | None
    text_field: str | None
    out: str = option("kvq.json", "Recipe to write.", type=TO_WRITE)
    centered: bool = option(
        False,
        "Store formats in groups, such as V in int4, without the means of their rows; that takes no bytes.",
    )
    context: int | None = option(None, "Tokens per window.  [default: 1024 or the context]", type=TOKENS)
    max_windows: int = option(32, "Windows to observe, spread over the text.")
    check: str | None = path_option(
        "--check", "Another text, to check the scales on; exit code 1 if they don't fit it.", type=TO_READ
    )
    fp8_out: str | None = path_option(
        "--fp8-out", "FP8 scales per tensor for other engines (.safetensors, .json)."
    )
    json_path: str | None = path_option("--json", "Write the statistics of every head as JSON.")
    device: str = option("auto", "auto, cpu or cuda.")
    dtype: str = option("auto", "Type of the weights: auto, fp32, bf16 or fp16.")
    max_model_len: int | None = option(
        None, "Longest context in tokens; pins longrope and dynamic RoPE.", type=TOKENS
    )
    revision: str | None = option(None, REVISION)
    token: str | None = option(None, TOKEN)


@click.command(name="calibrate")
@model_argument(None)
@text_options("help topics of CPython that are not held out")
@kv_option("fp8_per_head", many=False)
@gathered(_CalibrateOptions, "options")
def command(model: str, kv: list[str], options: _CalibrateOptions) -> None:
    """Observe MODEL, and write the scales required by static formats to a kvq.json.

    The scales work for both fp8_per_head and int8_per_head, rotated or not. The file is also a recipe: `--kv
    kvq.json` uses its formats, and `--scales kvq.json` uses its scales with other formats.
    """
    from kvq.calib import observe
    from kvq.calib.domain import verdict_of
    from kvq.calib.export import check_export_path, write_fp8_scales
    from kvq.calib.observe import summarize
    from kvq.commands.shared.loading import load_checked
    from kvq.evals import calibration_text, read_text
    from kvq.models.loading.prepared import prepare
    from kvq.weights.manifest import relist

    source = calibration_text() if options.text is None else read_text(options.text, options.text_field)
    other = None if options.check is None else read_text(options.check, options.text_field)
    begin(options.out, options.json_path)
    if options.fp8_out is not None:
        check_export_path(options.fp8_out)
    loading = picked(options, "device", "dtype", "revision", "token")
    prepared = prepare(model, max_context=options.max_model_len, **loading)
    recipe = prepared.recipe(kv[0])
    _check_options(prepared, recipe, (source, other), options)
    loaded = load_checked(prepared, None)
    windows = picked(options, "context", "max_windows")
    with progress_bar("calibrating") as progress:
        seen = observe(loaded, source, **windows, progress=progress)
    recipe = dataclasses.replace(
        recipe,
        centers=seen.centers().some(_is_grouped(recipe)) if options.centered else recipe.centers,
        static_scales=seen.scales(),
        model_digest=loaded.weights.digest,
    )
    recipe.save(options.out)
    relist(options.out)
    heads = summarize(seen)
    check = None if other is None else _check(loaded, recipe, seen, other, options.context)
    if options.fp8_out is not None:
        write_fp8_scales(options.fp8_out, seen, loaded.geometry)
    facts = {
        "model_digest": loaded.weights.digest,
        "text": seen.text.name,
        "text_digest": seen.text.digest,
        "tokens": seen.tokens,
        **({} if check is None else {"check": check}),
    }
    write_rows(heads, options.json_path, loaded.weights.device, facts)
    _print(recipe, seen, heads, options)
    if check is not None:
        echo(verdict_of(check))
        if check["is_fit"] is False:
            sys.exit(1)


def _check_options(
    prepared: "PreparedModel",
    recipe: KVRecipe,
    texts: "tuple[EvalText, EvalText | None]",
    options: _CalibrateOptions,
) -> None:
    """Raise ConfigError or RequestError if a format or text is unsuitable, before weights are loaded."""
    from kvq.calib.domain import check_length
    from kvq.calib.observe import spread_windows

    source, other = texts
    recipe.check_stored("calibrate")
    if options.centered and not any(map(any, _is_grouped(recipe))):
        raise ConfigError(
            f"--centered is for formats in groups, such as int4_g32_s8_rot, got --kv {recipe.name}; "
            f"leave it out"
        )
    spread_windows(prepared, source.text, context=options.context, max_windows=options.max_windows)
    if other is not None:
        check_length(prepared, other, options.context)


def _is_grouped(recipe: KVRecipe) -> list[tuple[bool, bool]]:
    """Return, for K and V of every layer, whether the format supports centers."""
    return [(isinstance(one.k.scale, Grouped), isinstance(one.v.scale, Grouped)) for one in recipe.layers]


def _check(
    model: "Model", recipe: KVRecipe, seen: "Observations", other: "EvalText", context: int | None
) -> dict[str, Any]:
    """Check the recipe on another text, or the observed FP8 scales if the recipe has no scales or centers."""
    from kvq.calib.domain import check_domain

    if not recipe.is_static and recipe.centers is None:
        recipe = model.prepared.recipe("fp8_per_head", seen.scales())
    with progress_bar("checking on the other text") as progress:
        return check_domain(model, recipe, seen, other, context=context, progress=progress)


def _print(
    recipe: KVRecipe, seen: "Observations", heads: list[dict[str, Any]], options: _CalibrateOptions
) -> None:
    echo(
        f"wrote {options.out}: {recipe.name}{', centered' if options.centered else ''}, static scales of "
        f"{len(seen.layers)} layers from {seen.tokens:,} tokens of {seen.text.name}"
    )
    if options.centered and any(one.k.is_per_channel for one in recipe.layers):
        echo(
            f"only V has centers: K of {recipe.name} has scales per channel, which include what centers take "
            f"out; for centers of both name groups, such as --kv int4_g32_s8_rot"
        )
    if seen.tokens < _FEW_TOKENS:
        warn(
            f"{seen.tokens:,} tokens say little about the largest values and about means; give a --text of "
            f"some thousand tokens"
        )
    for line in _outlier_notes(heads, centered=options.centered):
        echo(line)


def _outlier_notes(heads: list[dict[str, Any]], *, centered: bool) -> list[str]:
    """Return a line about outlier channels, and one about channels with huge biases."""
    notes = []
    removal = "taken out" if centered else "--centered, or K per channel as in int4, takes them out"
    for what, channels, size, why in (
        (
            "outlier channels",
            "outlier_channels",
            "largest_outlier",
            "rotated formats spread them over the row",
        ),
        ("huge biases", "biased_channels", "largest_bias", removal),
    ):
        if not (found := [row for row in heads if row[channels]]):
            continue
        most = max(found, key=itemgetter(size))
        count = sum(len(row[channels]) for row in found)
        layers = sorted(
            {f"{row['part'].upper()}{row['layer']}" for row in found}, key=lambda x: (x[0], int(x[1:]))
        )
        notes.append(
            f"{what}: {count} channels in {', '.join(layers)}; the largest, in {most['part'].upper()} of "
            f"layer {most['layer']}, head {most['head']}, is {most[size]:.1f} times the median channel "
            f"({why})"
        )
    return notes
