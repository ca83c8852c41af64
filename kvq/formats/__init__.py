"""KV formats: names, sizes, recipes and static scales. No tensors, no torch."""

from kvq.formats.centers import Centers, LayerCenters
from kvq.formats.names import FOREIGN_NAMES, KNOWN_NAMES, KVName, parse_format, split_pair
from kvq.formats.recipe import KVRecipe, LayerFormats
from kvq.formats.scales import SMALLEST_MAXIMUM, HeadMaxima, StaticScales
from kvq.formats.spec import Code, Grouped, KVFormat, PerHead, PerTokenHead, legal_group_sizes

__all__ = [
    "FOREIGN_NAMES",
    "KNOWN_NAMES",
    "SMALLEST_MAXIMUM",
    "Centers",
    "Code",
    "Grouped",
    "HeadMaxima",
    "KVFormat",
    "KVName",
    "KVRecipe",
    "LayerCenters",
    "LayerFormats",
    "PerHead",
    "PerTokenHead",
    "StaticScales",
    "legal_group_sizes",
    "parse_format",
    "split_pair",
]
