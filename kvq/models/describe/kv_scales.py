"""Static FP8 scales of K and V stored in a checkpoint with its weights: value = code * scale."""

import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path

from kvq.formats.calibrated import HeadMaxima
from kvq.geometry import ModelGeometry
from kvq.models.describe.text_part import read_tensors

# Names of compressed-tensors, vLLM, modelopt and older vLLM checkpoints; `kv_scale` is for both K and V.
_NAME = re.compile(
    r"\.(\d{1,9})\.\w+\.(?:(?:attn\.)?([kv])_scale|([kv])_proj\.(?:output_scale|[kv]_scale)|kv_scale)$"
)
_BESIDE = re.compile(r"\.\d{1,9}\.\w+\.(?:attn\.)?(?:(q|prob)_scale|[kvq]_zero_point)$")  # not read here
_LARGEST = 448.0  # the largest FP8 value
_log = logging.getLogger("kvq")


def is_kv_scale(name: str) -> bool:
    """Return True if the name is that of a K or V scale, or of a related tensor in some checkpoints."""
    return _NAME.search(name) is not None or _BESIDE.search(name) is not None


def read_kv_scales(
    folder: Path, geometry: ModelGeometry, names: Sequence[str]
) -> tuple[HeadMaxima, ...] | None:
    """Return every layer's K and V maxima (scale * 448) from the named tensors, or None if unusable.

    Both outcomes are logged, unless there are no scales at all.
    """
    places = {
        (int(match[1]), part): name
        for name in names
        if (match := _NAME.search(name))
        for part in match[2] or match[3] or "kv"
    }
    if not places:
        return None
    where, stored = next(iter(places.values())), read_tensors(folder)

    def maxima(layer: int, part: str, heads: int) -> tuple[float, ...]:
        found = [float(scale) * _LARGEST for scale in stored[places[layer, part]].float().flatten()]
        if len(found) not in (1, heads) or not all(0 < one < math.inf for one in found):
            raise ValueError(f"{places[layer, part]} holds no scale above 0 for all heads, or one for each")
        return tuple(found * heads if len(found) == 1 else found)

    zeros = [name for name in names if (match := _BESIDE.search(name)) and match[1] is None]
    try:
        if any(bool(stored[name].any()) for name in zeros):
            raise ValueError(f"{zeros[0]} is not zero everywhere")
        layers = tuple(
            HeadMaxima(**{part: maxima(layer.number, part, layer.kv_heads) for part in ("k", "v")})
            for layer in geometry.layers
        )
    except (KeyError, ValueError) as error:
        why = f"layer {error.args[0][0]} has none" if isinstance(error, KeyError) else error
        _log.warning("%s: its scales of K and V, such as %s, are passed over: %s", folder, where, why)
        return None
    _log.warning(
        "%s brings scales of K and V (%s): fp8_per_head and int8_per_head take them, other formats do not",
        *(folder, where),
    )
    return layers
