"""`kvq calibrate`: static scales from a model's own K and V, written to kvq.json."""

import click

from kvq.commands.options import kv_option


@click.command(name="calibrate")
@click.argument("model")
@click.option(
    "--text",
    type=click.Path(),
    help="UTF-8 text file.  [default: help topics of CPython that are not held out]",
)
@click.option(
    "--out", default="kvq.json", show_default=True, type=click.Path(), help="Where to write the recipe."
)
@kv_option("fp8_per_head", many=False)
@click.option("--context", type=int, help="Tokens per window.  [default: 1024, or what the model takes]")
@click.option("--max-windows", default=32, show_default=True, help="Windows taken, spread over the text.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--dtype", default="auto", show_default=True, help="Of the weights: auto, fp32, bf16 or fp16.")
@click.option(
    "--max-model-len",
    type=click.IntRange(min=1),
    help="Longest context in tokens; pins longrope and dynamic RoPE.",
)
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option("--token", help="Hub token for gated or private models.")
def command(
    model: str,
    text: str | None,
    out: str,
    kv: list[str],
    context: int | None,
    max_windows: int,
    device: str,
    dtype: str,
    max_model_len: int | None,
    revision: str | None,
    token: str | None,
) -> None:
    """Observe MODEL and write static scales to a kvq.json.

    The scales serve fp8_per_head and int8_per_head alike, rotated or not. The file is also a recipe:
    `--kv kvq.json` uses the formats it names, `--scales kvq.json` its scales under other formats.
    """
    from kvq import fileio
    from kvq.calib import calibrate
    from kvq.commands.progress import progress_bar, status
    from kvq.evals import calibration_text, read_text
    from kvq.models.model import load, resolve_recipe

    source = calibration_text() if text is None else read_text(text)
    fileio.check_writable(out)
    with status(f"loading {model}"):
        loaded = load(
            model, device=device, dtype=dtype, max_context=max_model_len, revision=revision, token=token
        )
    recipe = resolve_recipe(loaded.weights, kv[0])
    with progress_bar("calibrating") as progress:
        scales = calibrate(loaded, source, context=context, max_windows=max_windows, progress=progress)
    recipe.with_scales(scales).save(out)
    click.echo(
        f"wrote {out}: {recipe.name}, static scales of {len(scales.layers)} layers from {scales.tokens:,} "
        f"tokens of {source.name}"
    )
