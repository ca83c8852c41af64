"""`kvq quantize`: a checkpoint of quantized weights, and what they cost."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.names import MODEL
from kvq.commands.options import Finite, text_options
from kvq.commands.screen import echo
from kvq.errors import ConfigError
from kvq.extras import BITSANDBYTES, require

if TYPE_CHECKING:
    from kvq.calib.quantize import QuantizeSettings, Quantizing
    from kvq.evals import EvalText

_METHODS = ("rtn", "gptq", "awq", "smoothquant", "fp8", "nf4", "int8-bnb")
_EVAL_CONTEXT = 1024  # tokens
_HELD_OUT = "held-out help topics of CPython"
_OWN = (  # fields of `QuantizeOptions`, but the method
    "bits", "group_size", "symmetric", "activations", "act_order", "damp", "scale_search", "alpha",
    "samples", "context", "seed",
)  # fmt: skip


@click.command(name="quantize")
@click.argument("model", type=MODEL)
@click.option("--method", default="gptq", show_default=True, type=click.Choice(_METHODS), help="How.")
@click.option("--bits", type=click.Choice(["8", "4", "3"]), help="Per weight.  [default: 4; 8 where fixed]")
@click.option(
    "--group-size",
    type=int,
    help="Inputs that share a scale; -1: the whole row.  [default: 128; -1 for 8 bits]",
)
@click.option(
    "--symmetric/--asymmetric", default=True, show_default=True, help="Without or with zero points."
)
@click.option(
    "--activations",
    type=click.Choice(["none", "int8", "fp8"]),
    help="Round inputs too, token by token.  [default: int8 for smoothquant, else none]",
)
@click.option(
    "--act-order",
    is_flag=False,
    flag_value="static",
    default="none",
    show_default=True,
    type=click.Choice(["none", "static", "group"]),
    help="gptq: most active inputs first; group: groups in that order too, for --format autogptq.",
)
@click.option(
    "--damp",
    default=0.01,
    show_default=True,
    type=Finite(0, 1),
    help="gptq: added to the Hessian's diagonal.",
)
@click.option(
    "--scale-search",
    default="weighted",
    show_default=True,
    type=click.Choice(["off", "squares", "weighted"]),
    help="gptq: search the range of every group.",
)
@click.option(
    "--alpha", type=Finite(0, 1), help="smoothquant: how much goes into weights.  [default: searched]"
)
@click.option(
    "--format",
    "file_format",
    default="compressed-tensors",
    show_default=True,
    type=click.Choice(["compressed-tensors", "autogptq", "autoawq"]),
    help="Of the folder.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write; a new one.")
@text_options("help topics of CPython that are not held out")
@click.option(
    "--samples", default=128, show_default=True, type=click.IntRange(8, 1024), help="To calibrate on."
)
@click.option("--context", type=int, help="Tokens of a sample.  [default: 2048, or what the model takes]")
@click.option("--seed", default=0, show_default=True, help="Of the choice of samples.")
@click.option("--kv-scales", is_flag=True, help="Add static FP8 scales of K and V, and a kvq.json beside.")
@click.option(
    "--eval",
    "eval_text",
    is_flag=False,
    flag_value=_HELD_OUT,
    type=click.Path(),
    help=f"Measure perplexity before and after, on a text or (alone) on {_HELD_OUT}.",
)
@click.option("--eval-windows", type=click.IntRange(1), help="Windows of it.  [default: all]")
@click.option("--overwrite", is_flag=True, help="Replace a folder that kvq wrote.")
@click.option(
    "--resume/--restart",
    default=True,
    show_default=True,
    help="Go on after an interruption, or throw away what is finished.",
)
@click.option("--json", "json_path", type=click.Path(), help="Write the report as JSON.")
@click.option("--device", default="auto", show_default=True, help="That computes: auto, cpu or cuda.")
@click.option("--dtype", default="auto", show_default=True, help="Of what stays: auto, fp32, bf16 or fp16.")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option("--token", help="Hub token for gated or private models.")
def command(**options: Any) -> None:
    """Quantize the weights of MODEL into a folder that kvq, vLLM and transformers load.

    Layer by layer: what was quantized before is what the next layer is calibrated on. Finished layers
    are kept in OUT.partial until the folder is whole; the same command goes on after an interruption.
    """
    from kvq.commands.results import begin

    begin(options["json_path"])
    if options["method"] in ("nf4", "int8-bnb"):
        _by_package(options)
        return
    work, settings, held_out = _asked(options)
    _quantize(work, settings, held_out, options)


def _asked(options: dict[str, Any]) -> "tuple[Quantizing, QuantizeSettings, Any]":
    """What the options mean; texts are read now, so that a wrong name fails before the work."""
    from kvq.calib.quantize import Quantizing
    from kvq.calib.quantize.choose import QuantizeOptions
    from kvq.evals import read_text

    if options["bits"] is not None:
        options["bits"] = int(options["bits"])
    settings = QuantizeOptions(method=options["method"], **{name: options[name] for name in _OWN}).settings()
    text, field = options["text"], options["text_field"]
    if text is not None and not (settings.method.needs_text or options["kv_scales"]):
        raise ConfigError(f"method {settings.method.value} looks at no text, but --text names one; drop it")
    work = Quantizing(
        model=options["model"],
        out=options["out"],
        file_format=options["file_format"],
        text=None if text is None else read_text(text, field),
        device=options["device"],
        dtype=options["dtype"],
        kv_scales=options["kv_scales"],
        overwrite=options["overwrite"],
        restart=not options["resume"],
        revision=options["revision"],
        token=options["token"],
    )
    return work, settings, _held_out(options["eval_text"])


def _held_out(text: str | None) -> "EvalText | None":
    """What to measure perplexity on, if anything."""
    from kvq.evals import default_text, read_text

    if text is None:
        return None
    return default_text() if text == _HELD_OUT else read_text(text, None)


def _quantize(
    work: "Quantizing", settings: "QuantizeSettings", held_out: Any, options: dict[str, Any]
) -> None:
    from kvq.calib.quantize import quantize_model
    from kvq.calib.quantize.output import check_output
    from kvq.commands.loading import say_model
    from kvq.commands.progress import named_progress
    from kvq.commands.quantize_report import print_report, report
    from kvq.commands.resources import measured
    from kvq.evals.results import write_json
    from kvq.evals.windows import token_windows

    check_output(work, settings)
    model = work.prepared()
    window = min(_EVAL_CONTEXT, model.geometry.max_context)
    if held_out is not None:
        token_windows(model.tokenizer, held_out.text, context=window)  # refused before the work
    say_model(model.source, model.digest)
    work = replace(work, model=model)
    device = model.device
    with _goes_on(work), named_progress() as progress, measured(device) as used:
        work = replace(work, progress=lambda what: partial(progress, what), on_resumed=_say_resumed)
        done = quantize_model(work, settings)
    quality = None
    if held_out is not None:
        quality = _perplexities([model.source, work.out], held_out, window, options)
    result = report(device, model.source.name, settings, done, used, quality, work.file_format)
    if options["json_path"] is not None:
        write_json(options["json_path"], result)
    print_report(done, used, quality, work.file_format)


@contextmanager
def _goes_on(work: "Quantizing") -> Iterator[None]:
    """Say what an interruption leaves."""
    from kvq.calib.quantize.partial import count_finished, partial_folder

    try:
        yield
    except KeyboardInterrupt:
        folder = partial_folder(work.out)
        if layers := count_finished(folder):
            again = "the same command without --restart" if work.restart else "the same command"
            echo(f"kvq: finished layers in {folder}: {layers}; {again} goes on from there", err=True)
        raise


def _say_resumed(layers: int) -> None:
    echo(f"kvq: finished layers of an earlier run: {layers}", err=True)


def _perplexities(models: list[Any], text: Any, window: int, options: dict[str, Any]) -> dict[str, Any]:
    """Perplexity before and after, as served, over unquantized KV."""
    from kvq.commands.loading import load_checked
    from kvq.commands.progress import progress_bar
    from kvq.evals import measure_perplexity
    from kvq.models.prepared import prepare

    found = []
    for model, when in zip(models, ("before", "after"), strict=True):
        loaded = load_checked(prepare(model, device=options["device"], max_context=window), None)
        with progress_bar(f"perplexity {when}") as progress:
            row = measure_perplexity(
                loaded,
                ["fp32"],
                text.text,
                context=window,
                max_windows=options["eval_windows"],
                progress=progress,
            )[0]
        found.append(row)
    before, after = found
    return {
        "text": text.name,
        "tokens": after.tokens,
        "perplexity_before": before.perplexity,
        "perplexity_after": after.perplexity,
        "perplexity_change": after.perplexity / before.perplexity - 1,
    }


def _by_package(options: dict[str, Any]) -> None:
    """bitsandbytes' own formats."""
    from kvq.calib.quantize.bnb import write_bitsandbytes
    from kvq.commands.progress import status

    require(f"--method {options['method']}", BITSANDBYTES)
    context = click.get_current_context()
    given = [
        name
        for name in (*_OWN, "file_format", "text", "kv_scales", "eval_text", "json_path")
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    ]
    if given:
        raise ConfigError(
            f"method {options['method']} is bitsandbytes' own and takes none of kvq's options; leave out "
            f"{', '.join('--' + name.replace('_', '-') for name in given)}"
        )
    with status(f"quantizing {options['model']} with bitsandbytes"):
        write_bitsandbytes(
            options["model"],
            options["out"],
            options["method"],
            device=options["device"],
            revision=options["revision"],
            token=options["token"],
        )
    echo(
        f"wrote {options['out']}, which kvq and transformers load where bitsandbytes and accelerate are "
        f"installed (pip install bitsandbytes accelerate)"
    )
