"""Printable text: escapes input so that it can't control a terminal, hide a line or break a stream."""

import re

# Control characters of ASCII and ISO 8859 (escape sequences, carriage returns, bells), rare line separators,
# characters that reorder text (embeddings, overrides, isolates), and unpaired surrogates, which no encoding
# has
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LAYOUT = "\n\t"


def printable(text: str, *, keep: str = _LAYOUT) -> str:  # D362: escaped where printed, not where read
    r"""Return the text with control characters escaped as Python does (`\x1b`), except those in `keep`."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Return the text as from `printable`, with line ends and tabs also escaped, for names within a line."""
    return printable(text, keep="")
