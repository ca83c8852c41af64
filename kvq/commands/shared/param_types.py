"""Types of option values: bounded numbers, token counts, sizes, lists, checked paths, and names."""

import math
import os
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

from kvq.errors import ConfigError
from kvq.formats.names import known_names, split_pair
from kvq.layout import MAX_BLOCK_SIZE
from kvq.sizes import parse_bytes, parse_tokens


class Finite(click.FloatRange):
    """Number with bounds; NaN and infinity are refused because comparisons may not exclude them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number

    def _describe_range(self) -> str:
        return _described(self, super()._describe_range())


def _described(bounds: click.FloatRange | click.IntRange, text: str) -> str:
    """Return the description of a range, or none without bounds, where click says x<=None."""
    return "" if bounds.min is bounds.max is None else text


class TokenCount(click.IntRange):
    """Number of tokens, such as 8192, 8k or 1M."""

    name = "tokens"

    def _describe_range(self) -> str:
        return _described(self, super()._describe_range())

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(parse_tokens(value) if isinstance(value, str) else value, param, ctx)
        except ConfigError as error:
            self.fail(f"{error}.", param, ctx)


class _CheckedPath(click.Path):
    """Path that is checked by a function before large packages are imported."""

    def __init__(self, check: Callable[[Any], object], path_type: type[Path] | None = None) -> None:
        super().__init__(path_type=path_type)
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        self._check(value)
        return super().convert(value, param, ctx)


def check_readable(path: str | Path, remedy: str = "") -> None:
    """Raise ConfigError if a path does not exist; hf:NAME and templates are not paths and are accepted."""
    try:
        if not str(path).startswith(("hf:", "{")):
            os.stat(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"can't read {path}: {why}{remedy}") from error


class Several(StringParamType):
    """Values separated by commas, converted to a tuple without duplicates."""

    def __init__(self, of: Any, name: str = "text") -> None:
        self._of, self.name = of, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(dict.fromkeys(self._of.convert(one.strip(), param, ctx) for one in value.split(",")))
        except click.BadParameter as error:
            self.fail(f"{error.message} Several have commas between.", param, ctx)


class _Size(StringParamType):
    """Amount of memory, such as 2GiB or 512M; the value is checked but not converted."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            parse_bytes(value, "it")
        except ConfigError as error:
            self.fail(f"{error}.", param, ctx)
        return value


AT_LEAST_0, POSITIVE = Finite(min=0), Finite(min=0, min_open=True)
SHARE = Finite(0, 1, min_open=True)
NATURAL, AT_LEAST_1, TOKENS = click.IntRange(min=0), click.IntRange(min=1), TokenCount(min=1)
PATH = click.Path(path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
TO_READ, FILE = _CheckedPath(check_readable), _CheckedPath(check_readable, Path)
_WITHOUT = "; a chat template is a Jinja file or text; without, the model's own is used"
TEMPLATE = _CheckedPath(partial(check_readable, remedy=_WITHOUT))
TO_WRITE = _CheckedPath(lambda path: import_module("kvq.fileio").check_writable(path))
BLOCK_SIZES = click.IntRange(1, MAX_BLOCK_SIZE)
SIZE = _Size()
TEXT_OR_MAPPING = StringParamType()  # in a config file, a mapping is also accepted and passed on as JSON


class ShellNames(StringParamType):
    """Text that shells complete from a list of names; the value is not checked.

    `find`: returns the names; it is called only for completion. `separators`: characters that separate names.
    `paths`: "model" or "file" if values may be paths. `halves`: returns the names that can form pairs.
    `missing`: error message if a required name is missing.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[str]],
        *,
        separators: str = "",
        paths: str = "",
        halves: Callable[[], Iterable[str]] = tuple,
        missing: str = "a MODEL is needed: a folder, a GGUF file, a hub name, or 'tiny'.",
    ) -> None:
        self._find = find
        self._halves = halves
        self._separators = separators
        self._paths = paths
        self.missing = missing

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return names that complete the text after the last separator, or a request for paths."""
        begin = 1 + max((incomplete.rfind(mark) for mark in self._separators), default=-1)
        find = self._find
        half, slash, _ = incomplete[begin:].partition("/")
        if slash and half.lower() in self._halves():
            begin, find = begin + len(half) + 1, self._halves
        before, last = incomplete[:begin], incomplete[begin:].lower()
        found = [CompletionItem(before + name) for name in find() if name.startswith(last)]
        # Paths come first, because bash's script drops items before them.
        is_path = self._paths == "model" or (self._paths and not found)
        return [CompletionItem(incomplete, type="file"), *found] if is_path else found


def _halves() -> list[str]:
    return [name for name in known_names() if split_pair(name).k == name]


def _embedded() -> tuple[str, ...]:
    from kvq.models.describe.resolve import EMBEDDED

    return tuple(EMBEDDED)


def _models() -> tuple[str, ...]:
    from kvq.capacity.plan.catalogue import known_models

    return (*_embedded(), *known_models())


def _gpus() -> tuple[str, ...]:
    from kvq.capacity.plan.gpus import known_gpus

    return tuple(known_gpus())


# For `kvq inspect`, because these names once meant other formats
RENAMED = "bare names keep K per channel of a block; what int4 was is int4_g32_s8_rot/int4_g32_s8_rot"

FORMATS = ShellNames(known_names, separators=",", paths="file", halves=_halves)  # or a kvq.json
ONE_FORMAT = ShellNames(known_names, paths="file", halves=_halves)
HALF_FORMAT = ShellNames(_halves)
MODEL = ShellNames(_embedded, paths="model")
PLANNED_MODEL = ShellNames(  # only the shape of these models is needed
    _models,
    paths="model",
    missing="Plans are of a model on GPUs: give MODEL and --gpu; see kvq models, kvq gpus.",
)
GPUS = ShellNames(_gpus, separators=",")
GPU = ShellNames(_gpus)
