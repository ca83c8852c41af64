"""Options that several commands share, with the spellings people know from other engines."""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.types import StringParamType

from kvq.commands.names import FORMATS, HALF_FORMAT, MODEL, ONE_FORMAT
from kvq.commands.screen import echo
from kvq.errors import ConfigError
from kvq.formats import split_exact, split_pair
from kvq.layout import BLOCK_SIZE, MAX_BLOCK_SIZE
from kvq.sizes import parse_bytes

_Command = TypeVar("_Command", bound=Callable[..., Any])


class Finite(click.FloatRange):
    """A number with bounds; NaN and infinity, which pass comparisons, are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class TextOrMapping(StringParamType):
    """A text; in a file of options also a mapping, which is handed on as JSON."""


AT_LEAST_0, POSITIVE = Finite(min=0), Finite(min=0, min_open=True)
AT_LEAST_1 = click.IntRange(min=1)
SPECULATION = (
    "How tokens are drafted: ngram, self, heads, or draft,model=FOLDER; ,k=4 for the most of a step."
)
ACCEPT = "Use a KV format even if the load check finds that it breaks the model."
GENERATION_CONFIG = (
    "Whose generation_config.json fills what is left out of sampling: auto (the model's), none, or a folder."
)
PATH = click.Path(path_type=Path)
BLOCK_SIZES = click.IntRange(1, MAX_BLOCK_SIZE)


def option(
    default: Any = None, help: str | None = None, *, type: Any = None, names: str = "", multiple: bool = False
) -> Any:
    """A field of a frozen dataclass that is an option of the commands which take one, by `gathered`.

    It is called as the field is, unless `names` has spellings with blanks between. False as the default
    makes a flag, True one with a --no- beside it. Defaults are shown, but for flags that are off.
    """
    attributes = {
        "default": default,
        "help": help,
        "type": type,
        "multiple": multiple,
        "is_flag": isinstance(default, bool),
        "show_default": default is not None and default is not False and default != (),
    }
    return dataclasses.field(default=default, metadata={"names": names.split(), "attributes": attributes})


def path_option(names: str, help: str) -> Any:
    """A field that is an `option` whose value is a path, and None unless it is given."""
    return option(None, help, names=names, type=click.Path())


def given_options() -> dict[str, str]:
    """The options that somebody typed: name and longest spelling."""
    context = click.get_current_context()
    return {
        one.name: max(one.opts, key=len)
        for one in context.command.params
        if one.name and context.get_parameter_source(one.name) is ParameterSource.COMMANDLINE
    }


def gathered(kind: type[Any], name: str) -> Callable[[_Command], _Command]:
    """Give a command one value of a frozen dataclass, called `name`.

    Its fields that are an `option` are added; others are of options above, and called as these are.
    """

    def gather(command: _Command) -> _Command:
        def change(values: dict[str, Any]) -> dict[str, Any]:
            own = {field.name: values.pop(field.name) for field in dataclasses.fields(kind)}
            return values | {name: kind(**own)}

        command = adapted(command, change)
        for field in reversed(dataclasses.fields(kind)):
            if field.metadata:
                own = field.name.replace("_", "-")
                names = field.metadata["names"] or [
                    f"--{own}/--no-{own}" if field.default is True else f"--{own}"
                ]
                click.option(*names, field.name, **field.metadata["attributes"])(command)
        return command

    return gather


def adapted(command: _Command, change: Callable[[dict[str, Any]], dict[str, Any]]) -> _Command:
    """The command, given other values than those of its options."""

    @functools.wraps(command)
    def wrapped(**values: Any) -> Any:
        return command(**change(values))

    return wrapped  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """How a command was told to load its model."""

    model: str = option(
        "tiny", "Folder, hub name, or 'tiny', the embedded model.", names="--model -m", type=MODEL
    )
    device: str = option("auto", "auto, cpu or cuda.")
    dtype: str = option(
        "auto", "Of the weights: auto (fp32 on a CPU, the checkpoint's on a GPU), fp32, bf16, fp16."
    )
    max_context: int | None = option(
        None,
        "Longest context in tokens; pins longrope and dynamic RoPE.",
        names="--max-model-len",
        type=AT_LEAST_1,
    )
    weights: str = option(
        "auto",
        "Round Linear layers on load: fp8, int8, int4, int4_gN, w8a8 ...; auto: as stored.",
        names="--weights --quantization",
    )
    block_size: int = option(BLOCK_SIZE, "Tokens per block.", type=BLOCK_SIZES)
    backend: str = option(
        "auto", "Kernels: auto, triton, triton-8bit, cpu, cpu-fp32 or reference; see `kvq doctor`."
    )
    cache: str = option("kvq", "Cache backend: kvq, dense (unquantized), or an installed package's.")
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    token: str | None = option(None, "Hub token for gated or private models.")
    scales: str | None = path_option("--scales", "A kvq.json with static scales, for the per-head formats.")
    calibrate_on_load: bool = option(False, "Make static scales now, from CPython's help topics.")

    def load_options(self) -> dict[str, Any]:
        """Keyword arguments of `kvq.models.prepared.prepare`."""
        apart = ("model", "scales", "calibrate_on_load")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in apart}


model_options = gathered(ModelOptions, "model_options")
json_option = click.option("--json", "json_path", type=click.Path(), help="Write the rows as JSON.")


def text_options(default: str) -> Callable[[_Command], _Command]:
    """Add --text, and --text-field: which field of a JSON line or of a dataset's row is the text."""
    text = click.option(
        "--text",
        type=click.Path(),
        help=f"Text file, .jsonl, .json, .parquet, or hf:NAME[:CONFIG[:SPLIT]].  [default: {default}]",
    )
    field = click.option(
        "--text-field",
        help="Field of a row of --text that is the text.  [default: text, content, prompt or messages]",
    )
    return lambda command: text(field(command))


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowOptions:
    """How a text is cut and computed, and whether it can show damage: fields of `TokenPlan`."""

    context: int = option(1024, "Tokens per window; windows are documents.")
    max_windows: int | None = option(
        None, "Stop after this many windows.  [default: the whole text]", type=AT_LEAST_1
    )
    chunk: int | None = option(None, "Prefill tokens per step.  [default: as many as fit]", type=AT_LEAST_1)
    instrument: bool = option(False, "Check that model and all of the text can show damage; exit 1 if not.")


def model_argument(command: _Command) -> _Command:
    """Let the model be named as an argument too; goes above `model_options`."""

    def change(values: dict[str, Any]) -> dict[str, Any]:
        named, model = values.pop("named"), values["model"]
        context = click.get_current_context()
        if named is not None and context.get_parameter_source("model") is not ParameterSource.DEFAULT:
            raise ConfigError(f"the model was named twice, {named!r} and --model {model!r}; name it once")
        return values | {"model": named or model}

    return click.argument("named", metavar="[MODEL]", required=False, type=MODEL)(adapted(command, change))


class Several(StringParamType):
    """Values with commas between; a tuple of them, each once."""

    def __init__(self, of: Any, name: str = "text") -> None:
        self._of, self.name = of, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(dict.fromkeys(self._of.convert(one.strip(), param, ctx) for one in value.split(",")))
        except click.BadParameter as error:
            self.fail(f"{error.message} Several have commas between.", param, ctx)


class OneNumber(click.IntRange):
    """A whole number where another command takes several, with commas between."""

    def __init__(self, low: int, high: int, instead: str) -> None:
        super().__init__(low, high)
        self._instead = instead

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and "," in value:
            self.fail(f"one number is taken here, got {value!r}; {self._instead}.", param, ctx)
        return super().convert(value, param, ctx)


class Size(StringParamType):
    """Bytes of memory, such as 2GiB or 512M; stays the text that it is."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            parse_bytes(value, "it")
        except ConfigError as error:
            self.fail(f"{error}.", param, ctx)
        return value


def kv_option(default: str, many: bool) -> Callable[[_Command], _Command]:
    """Add --kv and its aliases --kv-cache-dtype, -ctk and -ctv; the command gets a list `kv`."""
    what = "KV formats, separated by commas" if many else "KV format"

    def add(command: _Command) -> _Command:
        def change(values: dict[str, Any]) -> dict[str, Any]:
            kv, k, v = (values.pop(name) for name in ("kv", "cache_type_k", "cache_type_v"))
            return values | {"kv": _named(kv, k, v, default, many)}

        command = adapted(command, change)
        for option in (
            click.option("-ctv", "--cache-type-v", type=HALF_FORMAT, help="Format of V alone, with -ctk."),
            click.option("-ctk", "--cache-type-k", type=HALF_FORMAT, help="Format of K alone, with -ctv."),
            click.option(
                "--kv",
                "--kv-cache-dtype",
                type=FORMATS if many else ONE_FORMAT,
                help=f"{what}: a name, a pair K/V, or a kvq.json.  [default: {default}]",
            ),
        ):
            command = option(command)
        return command

    return add


def _named(kv: str | None, k: str | None, v: str | None, default: str, many: bool) -> list[str]:
    if kv is not None and (k is not None or v is not None):
        raise ConfigError("--kv and -ctk/-ctv both name the KV format; give one of them")
    if (k is None) != (v is None):
        raise ConfigError("-ctk and -ctv name one half each; give both, or --kv for K and V alike")
    if k is not None:
        kv = "auto" if (k, v) == ("auto", "auto") else f"{k}/{v}"
    names = [name.strip() for name in (default if kv is None else kv).split(",")]
    if not many and len(names) > 1:
        raise ConfigError(f"one KV format is needed, got {len(names)}: {', '.join(names)}")
    notes = []
    for name in names:
        if name != "auto" and not name.endswith(".json"):
            notes.append(split_pair(split_exact(name)[0]).note)
    for note in dict.fromkeys(filter(None, notes)):
        echo(f"kvq: {note}", err=True)
    return names
