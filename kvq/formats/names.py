"""Format names: canonical names, short names, and the spellings used by other engines."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from kvq.errors import ConfigError, nearest
from kvq.formats import spec
from kvq.formats.codes import CODES, Code, Kind
from kvq.formats.spec import KVFormat

GROUP = "gN"  # stands for g32, g64 ... among suffixes
_ALIKE, _ALIKE_CODE = 0.5, 0.6  # minimum similarity, from 0 to 1, of a suffix and of a code
_OF_WIDTH = {16: "bf16", 8: "int8"}  # in pairs such as k8v4; other widths are grouped codes

# Spellings of other engines -> ours. `auto` is resolved where the model's dtype is known.
FOREIGN_NAMES = {
    **dict.fromkeys(("f32", "float32"), "fp32"),
    **dict.fromkeys(("f16", "half", "float16"), "fp16"),
    "bfloat16": "bf16",
    **dict.fromkeys(("fp8_e4m3", "fp8_e4m3fn", "fp8_inc"), "fp8"),
    **dict.fromkeys(("q8_0", "u8"), "int8"),
    **dict.fromkeys(("q5_0", "q5_1"), "int5_g32"),
    **dict.fromkeys(("q4_0", "q4_1", "iq4_nl", "u4"), "int4_g32"),
    "int4_per_token_head": "int4_g32_s8_rot",
}

MOST_EXACT = 65536  # tokens that stay unquantized

# Prefixes in vLLM's --kv-cache-dtype: of a format's name, as in kvq_int4, and of the path of a kvq.json.
VLLM_PREFIX, VLLM_FILE_PREFIX = "kvq_", "kvq:"

_NAME = re.compile(
    r"(?P<code>[a-z]+[0-9]+)"
    r"(?:_(?:(?P<scale>per_token_head|per_head|per_channel)|g(?P<group>0|[1-9][0-9]{0,4})(?P<narrow>_s8)?))?"
    r"(?P<mean>_mean)?(?P<rotated>_rot)?"
)
_TAIL = re.compile(r"(sinks|recent)=([0-9]{1,6})")
_PAIR = re.compile(r"k([0-9]{1,2})v([0-9]{1,2})")


def known_names() -> tuple[str, ...]:
    """Return the names listed by errors and `kvq inspect`; other group sizes and `_rot` are also valid."""
    names = []
    for code in CODES.values():
        ends = (*_scales(code), *(f"g{n}" for n in code.shown_groups))
        names += [code.name, *(f"{code.name}_{end}" for end in ends)]
    return (*names, "k8v4")


@dataclass(frozen=True, slots=True)
class _KVName:
    """K and V format names for a `--kv` value, and a note if the value was mapped to other names."""

    k: str
    v: str
    note: str = ""  # for the user, if a foreign spelling was mapped


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactTokens:
    """Tokens of a sequence that stay unquantized, in bf16: the first (sinks) and the most recent ones.

    Sinks are stored in complete blocks. A block is quantized when it is full and followed by `recent` tokens.
    """

    sinks: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        for name in ("sinks", "recent"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= MOST_EXACT:
                raise ConfigError(f"{name} must be 0 to {MOST_EXACT} tokens, got {value!r:.40}")

    def __str__(self) -> str:
        given = [("sinks", self.sinks), ("recent", self.recent)]
        return "".join(f"+{name}={value}" for name, value in given if value)


NOTHING_EXACT = ExactTokens()


def split_exact(text: str) -> tuple[str, ExactTokens]:
    """Split a `--kv` value such as `int3+sinks=4+recent=128` into its formats and its unquantized tokens.

    Raises:
        ConfigError: a plus is followed by anything else, or a number is out of range or repeated.
    """
    formats, *parts = text.strip().lower().split("+")
    found: dict[str, int] = {}
    for part in parts:
        match = _TAIL.fullmatch(part.strip())
        if match is None or match[1] in found:
            raise ConfigError(
                f"after formats come +sinks=N and +recent=N, each at most once, in tokens; got {part!r} in "
                f"{text!r}"
            )
        found[match[1]] = int(match[2])
    return formats, ExactTokens(**found)


def split_pair(text: str) -> _KVName:
    """Split a `--kv` value into its K and V names: `int4`, `int8/int4`, `k8v4`, `q8_0`.

    Raises:
        ConfigError: the value has another form, or names an unknown format.
    """
    name = text.strip().lower()
    if pair := _of_widths(name):
        return pair
    k, slash, v = name.partition("/")
    k, v = k.strip(), (v.strip() if slash else k.strip())
    notes = []
    ours = []
    for part in (k, v):
        mapped = FOREIGN_NAMES.get(part, part)
        if mapped != part:
            notes.append(f"{part} is read as kvq's {mapped}")
        if mapped not in spec.Own.registered:
            _read(mapped, text)
        ours.append(mapped)
    return _KVName(ours[0], ours[1], "; ".join(dict.fromkeys(notes)))


def parse_key_format(name: str, head_dim: int) -> KVFormat:
    """Return K's format for a name if complete blocks are quantized: bare names then mean per-channel scales.

    Offsets and ranges of keys differ between channels. FP8 is too imprecise for keys: `fp8` means INT8 here.

    Raises:
        ConfigError: as for `parse_format`.
    """
    bare = CODES.get("int8" if name == "fp8" else name)
    if bare is not None and (bare.is_grouped or bare is Code.INT8):
        fmt = KVFormat(code=bare, scale=spec.PerChannel())
        if fmt.fits(head_dim):
            return fmt
    return parse_format(name, head_dim)


def parse_format(name: str, head_dim: int) -> KVFormat:  # D1
    """Return the format called `name` for rows of `head_dim` elements.

    The bare name of a grouped code stands for the largest valid group size up to the code's `group` (32
    elements), 8-bit scales, and rotation; it may be followed by `_mean`.

    Raises:
        ConfigError: the name is unknown, or `head_dim` does not fit the format.
    """
    if (own := spec.Own.registered.get(name)) is not None:
        fmt = KVFormat(code=Code.FP32, own=own)
        fmt.check(head_dim)
        return fmt
    code, read = _read(name, name)
    rotated = read["rotated"] is not None
    scale: spec.ScaleMode | None = None
    if read["scale"] == "per_channel":
        scale = spec.PerChannel()
    elif code.kind is Kind.SCALED:
        scale = spec.PerHead() if read["scale"] == "per_head" else spec.PerTokenHead()
    elif code.is_grouped and read["group"] is None:
        fitting = [n for n in spec.legal_group_sizes(head_dim) if n <= code.group]
        scale, rotated = spec.Grouped(max(fitting, default=head_dim), is_narrow=True), True
    elif read["group"] is not None:
        scale = spec.Grouped(int(read["group"]), is_narrow=read["narrow"] is not None)
    fmt = KVFormat(code=code, scale=scale, rotated=rotated, mean=read["mean"] is not None)
    fmt.check(head_dim)
    return fmt


def _read(name: str, given: str) -> tuple[Code, re.Match[str]]:
    """Return the code of the format called `name`, and the match of `_NAME` with its suffixes.

    Raises:
        ConfigError: there is no such format; the message shows the value `given` by the user.
    """
    match = _NAME.fullmatch(name)
    code = CODES.get(match["code"]) if match else None
    if match is None or code is None:
        raise _unknown(name, given)
    scale, has_group, has_mean = match["scale"], match["group"] is not None, match["mean"] is not None
    if scale is not None and scale not in _scales(code):
        raise _unknown(name, given)
    if (has_group or has_mean) and (not code.is_grouped or (has_mean and scale is not None)):
        raise _unknown(name, given)
    return code, match


def _scales(code: Code) -> tuple[str, ...]:
    """Return the suffixes of a code's names that specify the scale mode, except for group sizes."""
    if code.kind is Kind.SCALED:
        return ("per_token_head", "per_head", *(["per_channel"] if code is Code.INT8 else []))
    return ("per_channel",) if code.is_grouped else ()


def _of_widths(name: str) -> _KVName | None:
    """Return the format names for a pair such as k8v4, or None if `name` has another form."""
    pair = _PAIR.fullmatch(name)
    codes = reversed(CODES.values())  # reversed, so that of equal widths the first code counts
    grouped = {code.bits: code.name for code in codes if code.is_grouped}
    k, v = ((grouped | _OF_WIDTH).get(int(bits)) for bits in pair.groups()) if pair else (None, None)
    return _KVName(k, v) if k and v else None


def _unknown(name: str, given: str) -> ConfigError:
    """Return the error for an unknown name, which may be part of the value `given` by the user."""
    known = (*known_names(), *spec.Own.registered)
    grouped = " and ".join(f"{code.name}_gN" for code in CODES.values() if code.is_grouped)
    shown = f"{name!r} in {given!r}" if "/" in given and name != given else repr(given)
    return ConfigError(
        f"unknown KV format {shown}{_meant(name, known) or ';'} "
        f"kvq knows {', '.join(known)}, {grouped} for any group size N, "
        f"'_s8' after it for scales of 8 bits, then '_mean' to take out block means, '_rot' after any of "
        f"them, pairs K/V such as int8/int4, and +sinks=N+recent=N after all"
    )


def _meant(name: str, known: tuple[str, ...]) -> str:
    """Return `; did you mean 'x'?` with a different name, or an empty string if none is similar."""
    lower = name.lower()
    if "/" in name or _of_widths(lower):
        return "; a pair is two formats, and here is room for one;"
    hint = FOREIGN_NAMES.get(lower) or _in_order(name)
    if hint and hint != name:
        return f"; did you mean {hint!r}?"
    return nearest(name, [x for x in (*known, *FOREIGN_NAMES) if x != lower])


def _in_order(name: str) -> str:
    """Return the format name made of those words of `name` that its code allows, or an empty string."""
    found, ends = respelled(name, CODES, ("per", "token", "head", "channel", GROUP, "s8", "mean", "rot"))
    if not found:
        return ""
    code = CODES[found]
    allowed = {"rot"}
    if code.is_grouped:
        allowed |= {GROUP, "s8", "mean"}
        if "s8" in ends or re.search("_g(?![0-9])", name.lower()):
            ends = {GROUP: f"g{code.group}", **ends}
    middle = ""
    if code.kind is Kind.SCALED and ends.keys() & {"per", "token", "head"}:
        middle = "_per_token_head" if "token" in ends else "_per_head"
    if "channel" in ends and "per_channel" in _scales(code):
        middle, allowed = "_per_channel", {"rot"}
    hint = code.name + middle + "".join(f"_{end}" for key, end in ends.items() if key in allowed)
    return hint if _NAME.fullmatch(hint) else ""


def respelled(name: str, codes: Iterable[str], suffixes: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Return the code with which a name begins (or ""), and its suffixes in the order of `suffixes`.

    With the suffixes `gN` and `rot`, `int4_rto_g064` becomes `int4` and {"gN": "g64", "rot": "rot"}. Words
    that don't resemble any suffix are omitted.
    """
    apart = re.sub(r"^([a-z]+[0-9]+)(?=[a-z])", r"\1_", name.strip().lower())
    first, *words = re.split(r"[_\s-]+", re.sub(r"(?<=_)(g[0-9]+)(?=[a-z])", r"\1_", apart))
    found: dict[str, str] = {}
    known = [suffix for suffix in suffixes if suffix != GROUP]
    for word in words:
        if group := re.fullmatch("g?0*([1-9][0-9]*)", word):
            found[GROUP] = f"g{group[1]}"
        elif close := get_close_matches(word, known, n=1, cutoff=_ALIKE):
            found[close[0]] = close[0]
    code = get_close_matches(first, list(codes), n=1, cutoff=_ALIKE_CODE)
    return code[0] if code else "", {suffix: found[suffix] for suffix in suffixes if suffix in found}
