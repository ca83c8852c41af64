"""Spelling correction of format names: to known words, in their canonical order."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

GROUP = "gN"  # stands for g32, g64 ... among suffixes
_ALIKE, _ALIKE_CODE = 0.5, 0.6  # minimum similarity, from 0 to 1, of a suffix and of a code


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
