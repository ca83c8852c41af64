"""Texts from outside, shown so that they can't steer a terminal, hide a line or break a stream."""

import re

# Controls of ASCII and ISO 8859 (escape sequences, carriage returns, bells), ends of lines that only some
# know, what reorders others' letters (embeddings, overrides, isolates), and halves of surrogate pairs,
# which no encoding has.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LAYOUT = "\n\t"


def printable(text: str, *, keep: str = _LAYOUT) -> str:
    r"""The text with its controls as Python writes them, such as `\x1b`; those in `keep` are left."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """The same with the ends of lines shown, too: for names, which stand within lines of ours."""
    return printable(text, keep="")
