"""Model geometry, derived from configs without torch."""

from kvq.geometry.families import FAMILIES
from kvq.geometry.geometry import (
    Expansion,
    LayerGeometry,
    LayerGroup,
    ModelGeometry,
    StateGeometry,
    StateTensor,
)
from kvq.geometry.parse import field_name, parse_geometry

__all__ = [
    "FAMILIES", "Expansion", "LayerGeometry", "LayerGroup", "ModelGeometry", "StateGeometry", "StateTensor",
    "field_name", "parse_geometry",
]  # fmt: skip
