"""Model geometry from configs. No torch."""

from kvq.geometry.families import FAMILIES, Family
from kvq.geometry.geometry import LayerGeometry, LayerGroup, ModelGeometry
from kvq.geometry.parse import parse_geometry

__all__ = ["FAMILIES", "Family", "LayerGeometry", "LayerGroup", "ModelGeometry", "parse_geometry"]
