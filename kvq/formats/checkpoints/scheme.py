"""Quantization scheme of a checkpoint: its quantized Linear layers, their formats and tensor names."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvq.errors import ModelError
from kvq.formats.weights import WeightFormat

_MAX_PATTERN = 1000
_MAX_REPEATS = 5
Layer = TypeVar("Layer")  # description of one layer

IN_BLOCKS = re.compile(r"(.*\.)?\d+\..*")  # layers outside the numbered blocks stay unquantized
EVERY = re.compile("")  # patterns match from the start of a layer's name


def exactly(name: str) -> re.Pattern[str]:
    """Return a pattern that matches only the layer called `name`."""
    return re.compile(rf"{re.escape(name)}\Z")


def containing(part: str) -> re.Pattern[str]:
    """Return a pattern that matches layers whose names contain `part`."""
    return re.compile(rf"(?s:.*){re.escape(part)}")


def ending(part: str) -> re.Pattern[str]:
    """Return a pattern that matches layers whose names end with `part`, at a word boundary."""
    return re.compile(rf"(?s:.*\.)?{re.escape(part)}\Z")


def fitting(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression from a config.

    Raises:
        ModelError: the expression is invalid, or could take forever on a long name.
    """
    repeats = len(re.findall(r"(?<!\\)[*+{]", pattern))
    if len(pattern) > _MAX_PATTERN or repeats > _MAX_REPEATS or re.search(r"(?<!\\)\)[*+{]", pattern):
        raise ModelError(
            f"config.json's quantization_config: pattern {pattern[:80]!r} is too involved: at most "
            f"{_MAX_PATTERN} characters, {_MAX_REPEATS} repeats and none of a group; name the layers instead"
        )
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(
            f"config.json's quantization_config: {pattern[:80]!r} is no regular expression ({error})"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerScheme:
    """Stored format of one layer on disk."""

    fmt: WeightFormat
    version: str  # of the file format: "pack-quantized", "gptq_v2", "gemm" ...
    suffixes: tuple[str, ...]  # tensors are called `{layer}.{suffix}`


Rule = tuple[re.Pattern[str], Layer | None]  # names of layers, and their description; None: unquantized


def first_of(rules: Iterable[Rule[Layer]], name: str) -> Layer | None:
    """Return the description in the first rule that matches a layer, or None if it stays unquantized."""
    return next((layer for pattern, layer in rules if pattern.match(name)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationScheme:
    """Content of a checkpoint's quantization_config; for each layer, the first matching rule applies."""

    file_format: str  # one of FILE_FORMATS
    version: str
    rules: Sequence[Rule[LayerScheme]]
    kv_scales: bool = False  # static FP8 scales of K and V are among the tensors

    def layer_of(self, name: str) -> LayerScheme | None:
        """Return the stored form of the Linear layer called `name`, or None if it is not quantized."""
        return first_of(self.rules, name)

    def format_of(self, name: str) -> WeightFormat | None:
        """Return the format of the Linear layer called `name`, or None if it is not quantized."""
        layer = self.layer_of(name)
        return None if layer is None else layer.fmt

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors on disk that store the layer's weight."""
        layer = self.layer_of(name)
        return (f"{name}.weight",) if layer is None else tuple(f"{name}.{part}" for part in layer.suffixes)
