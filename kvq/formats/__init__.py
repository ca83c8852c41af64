"""KV formats: names, sizes, recipes and static scales; no tensors, and no dependency on torch."""

from kvq.formats.calibrated import SMALLEST_MAXIMUM, Centers, HeadMaxima, LayerCenters, StaticScales
from kvq.formats.codes import CODES, Code, Kind
from kvq.formats.names import (
    FOREIGN_NAMES,
    ExactTokens,
    known_names,
    parse_format,
    parse_key_format,
    split_exact,
    split_pair,
)
from kvq.formats.recipe import KVRecipe, LayerFormats
from kvq.formats.spec import (
    BLOCK_SIZE,
    Grouped,
    KVFormat,
    PerChannel,
    PerHead,
    PerTokenHead,
    legal_group_sizes,
    mean_format,
)

__all__ = [
    "BLOCK_SIZE", "CODES", "FOREIGN_NAMES", "SMALLEST_MAXIMUM", "Centers", "Code", "ExactTokens", "Grouped",
    "HeadMaxima", "KVFormat", "KVRecipe", "Kind", "LayerCenters", "LayerFormats", "PerChannel", "PerHead",
    "PerTokenHead", "StaticScales", "known_names", "legal_group_sizes", "mean_format", "parse_format",
    "parse_key_format", "split_exact", "split_pair",
]  # fmt: skip
