"""Text up to a marker."""

import re
from collections.abc import Sequence
from functools import cache

from kvq.server.tools.output import Output
from kvq.server.tools.source import Source, Steps


def until_marker(
    source: Source, output: Output, markers: Sequence[str], *, ends: Sequence[str]
) -> Steps[str]:
    """Show text up to a marker and read that; "" at the end of the text.

    What is read from the marker on is held in the source: if no call follows, it is text. Markers of a single
    character count at the start of a line only. `ends` are those behind calls, left out once there was one.
    """
    words = (*markers, *ends)
    plain = _without("".join(sorted({word[0] for word in words})))
    while char := (yield from source.peek()):
        if text := source.run(plain):
            output.text(text)
            continue
        if char in markers and not output.is_line_start:
            output.text(source.take())
            continue
        source.hold()
        word = yield from source.one_of(words)
        if word and word not in ends:
            return word
        if word and output.num_calls:
            source.drop()
        else:
            yield from no_call(source, output)
    return ""


def end_of_call(source: Source, output: Output, end: str) -> Steps[None]:
    """Read the marker behind a call, if it is there."""
    source.hold()
    yield from source.skip_space()
    if (yield from source.word(end)):
        source.drop()
    else:
        yield from no_call(source, output)


def no_call(source: Source, output: Output) -> Steps[None]:
    """Show what was held: it was no call. Behind one, the rest of an answer that breaks off is left out."""
    if output.is_behind_call and not (yield from source.peek()):
        source.drop()
    else:
        output.text(source.release())


@cache
def _without(characters: str) -> re.Pattern[str]:
    return re.compile(f"[^{re.escape(characters)}]+")
