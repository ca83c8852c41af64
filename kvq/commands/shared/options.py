"""Options shared by commands, including spellings that are common in other engines."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from kvq.commands.shared.declare import adapted, gathered, option, path_option
from kvq.commands.shared.param_types import (
    AT_LEAST_1,
    BLOCK_SIZES,
    FORMATS,
    HALF_FORMAT,
    MODEL,
    ONE_FORMAT,
    PLANNED_MODEL,
    TO_READ,
    TO_WRITE,
    TOKENS,
    ShellNames,
    TokenCount,
    check_readable,
)
from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError
from kvq.formats import split_exact, split_pair
from kvq.layout import BLOCK_SIZE

_Command = TypeVar("_Command", bound=Callable[..., Any])
SPECULATION = "Drafting method: ngram, self, heads, or draft,model=FOLDER; ,k=4 limits the drafts of a step."
ACCEPT = "Use a KV format even if the load check finds that it breaks the model."
GENERATION_CONFIG = (
    "generation_config.json with defaults for sampling: auto (the model's), none, or a folder with one."
)
REVISION, TOKEN = "Branch, tag or commit of a hub model.", "Hub token for gated or private models."


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Options for a model and for loading it."""

    model: str
    device: str = option("auto", "auto, cpu or cuda.")
    dtype: str = option(
        "auto",
        "Type of the weights: auto (fp32 on a CPU, the checkpoint's on a GPU), fp32, bf16, fp16.",
        type=click.Choice(("auto", "fp32", "bf16", "fp16")),
    )
    max_context: int | None = option(
        None,
        "Longest context in tokens; pins longrope and dynamic RoPE.",
        names="--max-model-len",
        type=TOKENS,
    )
    weights: str = option(
        "auto",
        "Round Linear layers on load: fp8, int8, int4, int4_gN, w8a8 ...; auto: as stored.",
        names="--weights --quantization",
    )
    activations: str = option(
        "auto",
        "Inputs of a GGUF file's layers: auto (8 bits in groups), full.",
        type=click.Choice(("auto", "full")),
    )
    block_size: int = option(BLOCK_SIZE, "Tokens per block.", type=BLOCK_SIZES)
    backend: str = option("auto", "auto, triton, triton-8bit, cpu, cpu-fp32, reference; see kvq doctor.")
    cache: str = option("kvq", "Cache backend: kvq, dense (unquantized), or an installed package's.")
    exact: bool = option(False, "Bits that depend on no batch, chunk or thread; refuse what can't keep this.")
    revision: str | None = option(None, REVISION)
    token: str | None = option(None, TOKEN)
    scales: str | None = path_option(
        "--scales", "A kvq.json with static scales, for the per-head formats.", type=TO_READ
    )
    calibrate_on_load: bool = option(False, "Make static scales now, from CPython's help topics.")

    def load_options(self) -> dict[str, Any]:
        """Return keyword arguments for `kvq.models.loading.prepared.prepare`."""
        apart = ("model", "scales", "calibrate_on_load")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in apart}


json_option = click.option("--json", "json_path", type=TO_WRITE, help="Write the rows as JSON.")


def text_options(default: str) -> Callable[[_Command], _Command]:
    """Add --text, and --text-field for the field of a JSON line or dataset row that contains the text."""
    text = click.option(
        "--text",
        type=TO_READ,
        help=f"Text file, .jsonl, .json, .parquet, or hf:NAME[:CONFIG[:SPLIT]].  [default: {default}]",
    )
    field = click.option(
        "--text-field",
        help="Field of a row of --text that holds the text.  [default: text, content, prompt or messages]",
    )
    return lambda command: text(field(command))


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowOptions:
    """Options for windows of a text and for the instrument check: fields of `TokenPlan`."""

    context: int = option(1024, "Tokens per window; windows are documents.", type=TokenCount())
    max_windows: int | None = option(None, "Stop after this many windows.  [default: all]", type=AT_LEAST_1)
    chunk: int | None = option(None, "Prefill tokens per step.  [default: as many as fit]", type=TOKENS)
    instrument: bool = option(False, "Check that model and all of the text can show damage; exit 1 if not.")


def model_argument(  # D354: MODEL is an argument; a single argument is the prompt
    default: str | None = "tiny",
    help: str = "Folder, GGUF file, hub name, or 'tiny', the embedded model; the same as MODEL.",
    *,
    kind: ShellNames = MODEL,
) -> Callable[[_Command], _Command]:
    """Add --model and MODEL, the first argument; the command receives a string `model`.

    Place the command's other arguments below this decorator; they take precedence if there are too few
    arguments.
    """

    def add(command: _Command) -> _Command:
        def change(values: dict[str, Any]) -> dict[str, Any]:
            if (model := _one_model(values.pop("words"), values["model"])) is None:
                raise click.UsageError(kind.missing)
            # With `kvq chat --url` this is a name on the server, and with `kvq plan` a name in kvq's
            # catalogue
            if model != default and kind is not PLANNED_MODEL and not values.get("url"):
                _check_model(model)
            return values | {"model": model}

        option = click.option("--model", "-m", type=kind, default=default, show_default=True, help=help)
        words = click.argument("words", metavar="[MODEL]", nargs=-1, type=kind)
        return words(option(adapted(command, change)))

    return add


def _one_model(words: tuple[str, ...], option: str | None) -> str | None:
    if len(words) > 1:
        raise ConfigError(f"one MODEL is taken, got {', '.join(words)}; quotes keep a text of words together")
    source = click.get_current_context().get_parameter_source("model")
    if words and source is ParameterSource.COMMANDLINE and Path(words[0]) != Path(option or ""):
        raise ConfigError(f"two models were named, {words[0]!r} and --model {option!r}; name one")
    return words[0] if words else option


def _check_model(model: str) -> None:
    """Raise ModelError if a folder or file can't be a model, before torch is imported."""
    from kvq.models.describe.checkpoint import read_config_json
    from kvq.models.describe.resolve import EMBEDDED, find_here

    if model not in EMBEDDED and (found := find_here(model)) is not None:
        read_config_json(found.folder)


def model_options(command: _Command) -> _Command:
    """Add MODEL and options for loading it; the command receives `ModelOptions` as `model_options`."""
    return model_argument()(gathered(ModelOptions, "model_options")(command))


def kv_option(default: str, many: bool) -> Callable[[_Command], _Command]:
    """Add --kv and its aliases --kv-cache-dtype, -ctk and -ctv; the command receives a list `kv`."""
    what = "KV formats, separated by commas" if many else "KV format"

    def add(command: _Command) -> _Command:
        def change(values: dict[str, Any]) -> dict[str, Any]:
            kv, k, v = (values.pop(name) for name in ("kv", "cache_type_k", "cache_type_v"))
            return values | {"kv": _named(kv, k, v, default, many)}

        command = adapted(command, change)
        for add_one in (
            click.option("-ctv", "--cache-type-v", type=HALF_FORMAT, help="Format of V alone, with -ctk."),
            click.option("-ctk", "--cache-type-k", type=HALF_FORMAT, help="Format of K alone, with -ctv."),
            click.option(
                "--kv",
                "--kv-cache-dtype",
                type=FORMATS if many else ONE_FORMAT,
                help=f"{what}: a name, a pair K/V, or a kvq.json.  [default: {default}]",
            ),
        ):
            command = add_one(command)
        return command

    return add


def _named(kv: str | None, k: str | None, v: str | None, default: str, many: bool) -> list[str]:
    if kv is not None and (k is not None or v is not None):
        raise ConfigError("--kv and -ctk/-ctv both name the KV format; give one of them")
    if (k is None) != (v is None):
        echo(f"kvq: {'-ctv' if v is None else '-ctk'} is not given and f16, as llama.cpp has it", err=True)
        k, v = k or "f16", v or "f16"
    if k is not None:
        kv = "auto" if (k, v) == ("auto", "auto") else f"{k}/{v}"
    names = [name.strip() for name in (default if kv is None else kv).split(",")]
    if not many and len(names) > 1:
        raise ConfigError(f"one KV format is needed, got {len(names)}: {', '.join(names)}")
    notes = []
    for name in names:
        if name.endswith(".json"):
            check_readable(name)
        elif name != "auto":
            notes.append(split_pair(split_exact(name)[0]).note)
    for note in dict.fromkeys(filter(None, notes)):
        echo(f"kvq: {note}", err=True)
    return names
