"""Types of option values: bounded numbers, token counts, sizes, lists and checked paths."""

import math
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.types import StringParamType

from kvq.errors import ConfigError
from kvq.layout import MAX_BLOCK_SIZE
from kvq.sizes import parse_bytes, parse_tokens


class Finite(click.FloatRange):
    """Number with bounds; NaN and infinity, which pass comparisons, are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number

    def _describe_range(self) -> str:  # click describes a range without bounds as x<=None
        return "" if self.min is self.max is None else super()._describe_range()


class TokenCount(click.IntRange):
    """Number of tokens, such as 8192, 8k or 1M."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(parse_tokens(value) if isinstance(value, str) else value, param, ctx)
        except ConfigError as error:
            self.fail(f"{error}.", param, ctx)


class _CheckedPath(click.Path):
    """Path that a function checks before anything large is imported."""

    def __init__(self, check: Callable[[Any], object], path_type: type[Path] | None = None) -> None:
        super().__init__(path_type=path_type)
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        self._check(value)
        return super().convert(value, param, ctx)


def check_readable(path: str | Path) -> None:
    """Raise ConfigError if a path does not exist; hf:NAME and templates are no paths and pass."""
    try:
        if not str(path).startswith(("hf:", "{")):
            os.stat(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {getattr(error, 'strerror', None) or error}") from error


class TextOrMapping(StringParamType):
    """Text; in a file of options also a mapping, which is passed on as JSON."""


class Several(StringParamType):
    """Values separated by commas; a tuple without repeated values."""

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
    """Whole number where another command takes several, separated by commas."""

    def __init__(self, low: int, high: int, instead: str) -> None:
        super().__init__(low, high)
        self._instead = instead

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and "," in value:
            self.fail(f"one number is taken here, got {value!r}; {self._instead}.", param, ctx)
        return super().convert(value, param, ctx)


class _Size(StringParamType):
    """Bytes of memory, such as 2GiB or 512M; the value stays text."""

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
TO_READ, FILE = _CheckedPath(check_readable), _CheckedPath(check_readable, Path)
TO_WRITE = _CheckedPath(lambda path: import_module("kvq.fileio").check_writable(path))
BLOCK_SIZES = click.IntRange(1, MAX_BLOCK_SIZE)
SIZE = _Size()
