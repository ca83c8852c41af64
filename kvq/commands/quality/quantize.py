"""`kvq quantize`: a checkpoint with quantized weights, and its perplexity."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.shared.declare import gathered, given_options, option, path_option, picked
from kvq.commands.shared.options import REVISION, TOKEN, model_argument, text_options
from kvq.commands.shared.param_types import AT_LEAST_1, TOKENS, Finite
from kvq.commands.shared.progress import named_progress, progress_bar, status
from kvq.commands.shared.results import begin, measured, write_rows
from kvq.commands.shared.terminal import echo, say_model
from kvq.errors import ConfigError
from kvq.evals.watch import Watch
from kvq.extras import BITSANDBYTES, require
from kvq.formats.ggml_mixtures import DEFAULT, NAMES, file_type

if TYPE_CHECKING:
    from kvq.calib.quantize import QuantizeSettings, Quantizing
    from kvq.evals import EvalText

_METHODS = ("rtn", "gptq", "awq", "smoothquant", "fp8", "nf4", "int8-bnb")
_EVAL_CONTEXT = 1024  # tokens
_HELD_OUT = "held-out help topics of CPython"


@dataclass(frozen=True, kw_only=True, slots=True)
class _MethodOptions:
    """Options for the quantization method and the weight format: fields of `QuantizeSettings`."""

    method: str | None = option(
        None, "Quantization method.  [default: gptq; rtn for GGUF]", type=click.Choice(_METHODS)
    )
    bits: str | None = option(
        None, "Bits per weight.  [default: 4; 8 where fixed]", type=click.Choice(["8", "4", "3"])
    )
    group_size: int | None = option(
        None, "Inputs that share a scale; -1: the whole row.  [default: 128; -1 for 8 bits]", type=int
    )
    symmetric: bool = option(True, "Without or with zero points.", names="--symmetric/--asymmetric")
    activations: str | None = option(
        None,
        "Also round inputs, token by token.  [default: int8 for smoothquant, else none]",
        type=click.Choice(["none", "int8", "fp8"]),
    )
    act_order: str
    damp: float = option(0.01, "gptq: added to the Hessian's diagonal.", type=Finite(0, 1))
    scale_search: str = option(
        "weighted",
        "gptq: how the range of every group is searched.",
        type=click.Choice(["off", "squares", "weighted"]),
    )
    alpha: float | None = option(
        None,
        "smoothquant: share of the scale that moves into weights.  [default: searched]",
        type=Finite(0, 1),
    )
    samples: int = option(128, "Samples to calibrate on.", type=click.IntRange(8, 1024))
    context: int | None = option(None, "Tokens of a sample.  [default: 2048 or the context]", type=TOKENS)
    seed: int = option(0, "Seed of the choice of samples.")

    def settings(self, file_format: str) -> "QuantizeSettings":
        """Convert the options to settings of the quantizer."""
        from kvq.calib.quantize import QuantizeSettings

        bits = None if self.bits is None else int(self.bits)
        method = self.method or ("rtn" if file_format == "gguf" else "gptq")
        return QuantizeSettings(**asdict(self) | {"bits": bits, "method": method})


@dataclass(frozen=True, kw_only=True, slots=True)
class _QuantizeOptions:
    text: str | None
    text_field: str | None
    file_format: str = option(
        "compressed-tensors",
        "File format of the checkpoint.",
        names="--format",
        type=click.Choice(["compressed-tensors", "autogptq", "autoawq", "gguf"]),
    )
    gguf_type: str | None = option(
        None,
        f"Type of a GGUF file, as llama.cpp names it.  [default: {DEFAULT}]",
        names="--type",
        type=click.Choice(NAMES, case_sensitive=False),
    )
    out: str
    kv_scales: bool = option(False, "Add static FP8 scales of K and V, and a kvq.json with them.")
    eval_text: str | None
    eval_windows: int | None = option(None, "Windows of the --eval text.  [default: all]", type=AT_LEAST_1)
    overwrite: bool = option(False, "Replace a folder that kvq wrote.")
    resume: bool = option(
        True, "Continue after an interruption, or discard finished layers.", names="--resume/--restart"
    )
    json_path: str | None = path_option("--json", "Write the report as JSON.")
    device: str = option("auto", "Device that computes: auto, cpu or cuda.")
    dtype: str = option("auto", "Type of unquantized weights: auto, fp32, bf16 or fp16.")
    revision: str | None = option(None, REVISION)
    token: str | None = option(None, TOKEN)

    def work(self, model: str) -> "Quantizing":
        """Return the input and output of the work; the text is read here so that a wrong name fails early."""
        from kvq.calib.quantize import Quantizing
        from kvq.evals import read_text

        names = ("file_format", "gguf_type", "device", "dtype", "kv_scales", "overwrite", "revision", "token")
        return Quantizing(
            model=model,
            out=Path(self.out),
            text=None if self.text is None else read_text(self.text, self.text_field),
            restart=not self.resume,
            **picked(self, *names),
        )


@click.command(name="quantize")
@model_argument(None)
@gathered(_MethodOptions, "method")
@click.option(
    "--act-order",
    is_flag=False,
    flag_value="static",
    default="none",
    show_default=True,
    type=click.Choice(["none", "static", "group"]),
    help="gptq: most active inputs first; group: also groups in that order, for --format autogptq.",
)
@click.option("--out", required=True, type=click.Path(), help="Folder to write, a new one, or GGUF file.")
@text_options("help topics of CPython that are not held out")
@gathered(_QuantizeOptions, "options")
@click.option(
    "--eval",
    "eval_text",
    is_flag=False,
    flag_value=_HELD_OUT,
    type=click.Path(),
    help=f"Measure perplexity before and after, on a text or (alone) on {_HELD_OUT}.",
)
def command(model: str, method: _MethodOptions, options: _QuantizeOptions) -> None:
    """Quantize the weights of MODEL, and write a folder that kvq, vLLM and transformers can load.

    With --format gguf, write a file that kvq and llama.cpp can load.

    Each layer is calibrated on the outputs of the quantized layers before it. Finished layers are kept in
    OUT.partial until the folder is complete, so the same command continues after an interruption.
    """
    begin(options.json_path)
    if method.method in ("nf4", "int8-bnb"):
        _by_package(model, method.method, options)
        return
    settings = method.settings(options.file_format)
    if options.text is not None and not (settings.needs_text or options.kv_scales):
        raise ConfigError(f"method {settings.method} uses no text, but --text names one; drop it")
    _quantize(options.work(model), settings, _held_out(options.eval_text), options)


def _held_out(text: str | None) -> "EvalText | None":
    """Return the text on which perplexity is measured, or None."""
    from kvq.evals import default_text, read_text

    if text is None:
        return None
    return default_text() if text == _HELD_OUT else read_text(text, None)


def _quantize(
    work: "Quantizing", settings: "QuantizeSettings", held_out: "EvalText | None", options: _QuantizeOptions
) -> None:
    from kvq.calib.quantize import quantize_model
    from kvq.calib.quantize.output import check_output
    from kvq.commands.quality.quantize_report import print_report, report
    from kvq.evals.divergence import TokenPlan
    from kvq.evals.text import token_windows

    check_output(work, settings)
    model = work.prepared()
    tokens = TokenPlan(
        context=min(_EVAL_CONTEXT, model.geometry.max_context), max_windows=options.eval_windows
    )
    if held_out is not None:
        token_windows(model.tokenizer, held_out.text, context=tokens.context)  # fails before the work starts
    say_model(model.source, model.digest)
    work = replace(work, model=model)
    with _goes_on(work), named_progress() as progress, measured(model.device) as used:
        work = replace(
            work,
            progress=lambda what: partial(progress, what),
            on_resumed=lambda layers: echo(f"kvq: finished layers of an earlier run: {layers}", err=True),
        )
        done = quantize_model(work, settings)
    quality = None
    if held_out is not None:
        quality = _perplexities([model.source, work.out], held_out, tokens, options.device)
    facts: dict[str, Any] = {"model": model.source.name, "settings": settings.described()}
    if work.file_format == "gguf":
        facts["settings"]["format"] = file_type(work.gguf_type or DEFAULT)
    facts |= report(done, used, quality, work.file_format)
    write_rows(done.rows, options.json_path, model.device, facts)
    print_report(done, used, quality, work.file_format)


@contextmanager
def _goes_on(work: "Quantizing") -> Iterator[None]:
    """Print the number of finished layers and how to continue if the block is interrupted."""
    from kvq.calib.quantize.partial import count_finished, partial_folder

    try:
        yield
    except KeyboardInterrupt:
        folder = partial_folder(work.out)
        if layers := count_finished(folder):
            again = "the same command without --restart" if work.restart else "the same command"
            echo(f"kvq: finished layers in {folder}: {layers}; {again} continues from there", err=True)
        raise


def _perplexities(models: list[Any], text: "EvalText", plan: Any, device: str) -> dict[str, Any]:
    """Measure perplexity before and after quantization, as served and with unquantized KV."""
    from kvq.commands.shared.loading import load_checked
    from kvq.evals import measure_perplexity
    from kvq.models.check.verdict import cautions
    from kvq.models.loading.prepared import prepare

    found = []
    for model, when in zip(models, ("before", "after"), strict=True):
        loaded = load_checked(prepare(model, device=device, max_context=plan.context), None)
        with progress_bar(f"perplexity {when}") as progress:
            found += measure_perplexity(loaded, ["fp32"], text.text, plan, Watch(progress))
    before, after = found
    return {
        "cautions": list(cautions(before.perplexity, before.chance_perplexity)),
        "text": text.name,
        "tokens": after.tokens,
        "perplexity_before": before.perplexity,
        "perplexity_after": after.perplexity,
        "perplexity_change": after.perplexity / before.perplexity - 1,
    }


def _by_package(model: str, method: str, options: _QuantizeOptions) -> None:
    from kvq.calib.quantize.bnb import write_bitsandbytes

    require(f"--method {method}", BITSANDBYTES)
    own = {one.name for one in fields(_MethodOptions)} - {"method"}
    own |= {"file_format", "gguf_type", "text", "kv_scales", "eval_text", "json_path"}
    if given := [spelled for name, spelled in given_options().items() if name in own]:
        raise ConfigError(
            f"method {method} is bitsandbytes' own and takes none of kvq's options; leave out "
            f"{', '.join(given)}"
        )
    with status(f"quantizing {model} with bitsandbytes"):
        write_bitsandbytes(options.work(model), method)
    echo(
        f"wrote {options.out}, which kvq and transformers load where bitsandbytes and accelerate are "
        f"installed (pip install bitsandbytes accelerate)"
    )
