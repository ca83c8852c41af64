"""`kvq generate`: text from a prompt, streamed, over quantized KV."""

import click

from kvq.commands.options import ModelOptions, kv_option, model_options


@click.command(name="generate")
@click.argument("prompt")
@kv_option("auto", many=False)
@model_options
@click.option("--max-tokens", "-n", default=64, show_default=True, help="Tokens to generate at most.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option(
    "--top-p", default=1.0, show_default=True, help="Nucleus sampling: keep this share of probability."
)
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-text token.")
def command(
    prompt: str,
    kv: list[str],
    model_options: ModelOptions,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    ignore_eos: bool,
) -> None:
    """Go on from PROMPT, streamed to standard output."""
    from kvq.commands.loading import load_for
    from kvq.models import SamplingParams

    options = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, ignore_eos=ignore_eos
    )
    model = load_for(model_options, kv).with_kv(kv[0])
    pieces = model.stream(prompt, options)  # refuses what it can't serve before anything is shown
    click.echo(prompt, nl=False)
    for piece in pieces:
        click.echo(piece.text, nl=False)
    click.echo()
