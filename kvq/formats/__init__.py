"""KV formats: names, sizes, recipes and static scales. No tensors, no torch."""

from kvq.formats.calibrated import SMALLEST_MAXIMUM, Centers, HeadMaxima, LayerCenters, StaticScales
from kvq.formats.codes import CODES, Code, Kind
from kvq.formats.names import FOREIGN_NAMES, known_names, parse_format, split_pair
from kvq.formats.recipe import KVRecipe, LayerFormats
from kvq.formats.spec import Grouped, KVFormat, PerHead, PerTokenHead, legal_group_sizes

__all__ = [
    "CODES",
    "FOREIGN_NAMES",
    "SMALLEST_MAXIMUM",
    "Centers",
    "Code",
    "Grouped",
    "HeadMaxima",
    "KVFormat",
    "KVRecipe",
    "Kind",
    "LayerCenters",
    "LayerFormats",
    "PerHead",
    "PerTokenHead",
    "StaticScales",
    "known_names",
    "legal_group_sizes",
    "parse_format",
    "split_pair",
]
