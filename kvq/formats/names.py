"""Names of formats: canonical, short, and the spellings that other engines use."""

import re
from dataclasses import dataclass

from kvq.errors import ConfigError, nearest
from kvq.formats.spec import (
    Code,
    Grouped,
    KVFormat,
    PerHead,
    PerTokenHead,
    ScaleMode,
    legal_group_sizes,
)

SHORT_NAMES = {"fp8": "fp8_per_token_head", "int8": "int8_per_token_head"}
_PREFERRED_GROUP = {Code.INT4: 64, Code.INT2: 32}  # largest group that `int4` and `int2` choose
_PAIR_CODES = {"16": "bf16", "8": "int8", "4": "int4", "2": "int2"}

# What other engines call it -> ours. `auto` is resolved by whoever knows the model's dtype.
FOREIGN_NAMES = {
    "f32": "fp32",
    "float32": "fp32",
    "f16": "fp16",
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "fp8_e4m3": "fp8",
    "fp8_e4m3fn": "fp8",
    "fp8_inc": "fp8",
    "q8_0": "int8",
    "q4_0": "int4_g32",
    "q4_1": "int4_g32",
    "iq4_nl": "int4_g32",
    "u8": "int8",
    "u4": "int4_g32",
    "int4_per_token_head": "int4",
}

# Shown by errors and `kvq inspect`; any legal group size and `_rot` may be combined besides.
KNOWN_NAMES = (
    "fp32",
    "bf16",
    "fp16",
    "fp8",
    "fp8_per_token_head",
    "fp8_per_head",
    "int8",
    "int8_per_token_head",
    "int8_per_head",
    "int4",
    "int4_g32",
    "int4_g64",
    "int4_g128",
    "int2",
    "int2_g32",
    "k8v4",
)

_FLOAT = re.compile(r"(fp32|bf16|fp16)")
_SCALED = re.compile(r"(fp8|int8)_(per_token_head|per_head)")
_GROUPED = re.compile(r"(int4|int2)_g(0|[1-9][0-9]{0,4})")
_PAIR = re.compile(r"k(16|8|4|2)v(16|8|4|2)")


@dataclass(frozen=True, slots=True)
class KVName:
    """The K and V format names that a `--kv` value stands for, and how it was understood."""

    k: str
    v: str
    note: str = ""  # set when a foreign spelling was mapped, for the user to read


def split_pair(text: str) -> KVName:
    """Split a `--kv` value into its K and V names: `int4`, `int8/int4`, `k8v4`, `q8_0`.

    Raises:
        ConfigError: the value is not of that form, or names no format.
    """
    name = text.strip().lower()
    if pair := _PAIR.fullmatch(name):
        return KVName(_PAIR_CODES[pair[1]], _PAIR_CODES[pair[2]])
    k, slash, v = name.partition("/")
    k, v = k.strip(), (v.strip() if slash else k.strip())
    notes = []
    ours = []
    for part in (k, v):
        mapped = FOREIGN_NAMES.get(part, part)
        if mapped != part:
            notes.append(f"{part} is read as kvq's {mapped}")
        _check_known(mapped, text)
        ours.append(mapped)
    return KVName(ours[0], ours[1], "; ".join(dict.fromkeys(notes)))


def parse_format(name: str, head_dim: int) -> KVFormat:
    """Return the format of that name for rows of `head_dim` elements.

    `int4` and `int2` choose the largest legal group up to 64 and 32 elements, rotated.

    Raises:
        ConfigError: unknown name, or one that `head_dim` does not fit.
    """
    base, rotated = _strip_rotation(SHORT_NAMES.get(name, name))
    base = SHORT_NAMES.get(base, base)
    scale: ScaleMode | None = None
    if base in ("int4", "int2"):
        code = Code(base)
        limit = _PREFERRED_GROUP[code]
        scale = Grouped(max((n for n in legal_group_sizes(head_dim) if n <= limit), default=head_dim))
        rotated = True
    elif match := _FLOAT.fullmatch(base):
        code = Code(match[1])
    elif match := _SCALED.fullmatch(base):
        code = Code(match[1])
        scale = PerHead() if match[2] == "per_head" else PerTokenHead()
    elif match := _GROUPED.fullmatch(base):
        code, scale = Code(match[1]), Grouped(int(match[2]))
    else:
        raise _unknown(name)
    fmt = KVFormat(code=code, scale=scale, rotated=rotated)
    fmt.check(head_dim)
    return fmt


def _strip_rotation(name: str) -> tuple[str, bool]:
    return (name[:-4], True) if name.endswith("_rot") else (name, False)


def _check_known(name: str, given: str) -> None:
    base, _ = _strip_rotation(name)
    known = base in (*SHORT_NAMES, "int4", "int2") or any(
        pattern.fullmatch(base) for pattern in (_FLOAT, _SCALED, _GROUPED)
    )
    if not known:
        raise _unknown(given)


def _unknown(name: str) -> ConfigError:
    return ConfigError(
        f"unknown KV format {name!r}{nearest(name, [*KNOWN_NAMES, *FOREIGN_NAMES]) or ';'} "
        f"kvq knows {', '.join(KNOWN_NAMES)}, int4_gN and int2_gN for any group size N, "
        f"'_rot' after any of them, and pairs K/V such as int8/int4"
    )
