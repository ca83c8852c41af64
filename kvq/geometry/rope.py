"""RoPE types: the known ones, and those that a config.json names."""

from collections.abc import Mapping
from typing import Any

# Types with frequencies that depend on the longest position in the batch.
BATCH_DEPENDENT_ROPE = ("longrope", "dynamic")
# Types of listed families.
ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional", *BATCH_DEPENDENT_ROPE)


def rope_types(config: Mapping[str, Any]) -> set[str]:
    """Return the RoPE types named in a config, for all layer types."""
    found = set()
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if isinstance(value, Mapping):
            for part in (value, *(x for x in value.values() if isinstance(x, Mapping))):
                name = part.get("rope_type", part.get("type"))
                if name is not None:
                    found.add("longrope" if name == "su" else str(name))
    return found
