"""Types of a GGUF file's tensors, by the name that llama.cpp has for the whole, such as Q4_K_M. No tensors.

Source: the choices of llama.cpp's quantizer when it gets no further options.
"""

from collections.abc import Sequence

from kvq.errors import ConfigError, nearest
from kvq.formats.ggml import GGML_TYPES, GgmlType

# Name of a file's type -> its number in general.file_type
FILE_TYPES = {
    "F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7, "Q4_K_S": 14,
    "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18,
}  # fmt: skip
DEFAULT = "Q4_K_M"
_ALIASES = {"Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
NAMES = (*FILE_TYPES, *_ALIASES)
_INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # where blocks don't divide rows
_ROUTERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")


def file_type(name: str) -> str:
    """Return a name in `FILE_TYPES`, in capitals and without aliases.

    Raises:
        ConfigError: there is no such type.
    """
    own = name.upper()
    if own not in NAMES:
        hint = nearest(own, [*NAMES]) or ";"
        raise ConfigError(f"unknown GGUF type {name!r}{hint} allowed: {', '.join(NAMES)}")
    return _ALIASES.get(own, own)


def wanted_type(name: str, shape: Sequence[int], mixture: str, *, layers: int, is_head: bool) -> GgmlType:
    """Return the type that llama.cpp gives to a tensor whose rows its blocks divide; see `fitting_type`.

    `is_head`: the tensor gives logits, also if it is the embedding too.
    """
    base = GGML_TYPES[mixture.removesuffix("_M").removesuffix("_S")]
    layer, part = (int(name.split(".")[1]) if name.startswith("blk.") else -1), name.split(".")[-2]
    if len(shape) < 2 or part in _ROUTERS or part.endswith("norm"):
        return GGML_TYPES["F32"]
    if base.is_float:
        return base
    if is_head:
        return base if base.name == "Q8_0" else GGML_TYPES["Q6_K"]
    if mixture.endswith("_M"):
        if part == "attn_v" or part.startswith("ffn_down"):
            return GGML_TYPES["Q6_K"] if _gets_more(layer, layers) else base
        if part == "attn_qkv":
            return GGML_TYPES["Q5_K" if base.name == "Q4_K" else "Q6_K"]
    is_first = layer < 4 if part == "attn_v" else part.startswith("ffn_down") and layer < layers // 8
    return GGML_TYPES["Q5_K"] if mixture == "Q4_K_S" and is_first else base


def fitting_type(wanted: GgmlType, count: int) -> GgmlType:
    """Return the type for rows of `count` values: if blocks don't divide them, another of about the bits."""
    if count % wanted.values and wanted.name in _INSTEAD:
        wanted = GGML_TYPES[_INSTEAD[wanted.name]]
    return GGML_TYPES["F16"] if count % wanted.values else wanted


def _gets_more(layer: int, layers: int) -> bool:
    """Return True for the first and the last eighth of all layers, and for every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
