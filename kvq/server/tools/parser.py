"""Parser of tool calls: text in, events out."""

import re
from collections.abc import Sequence

from kvq.server.tools.format import Schemas, Tool, ToolFormat
from kvq.server.tools.output import Event, Output, no_call
from kvq.server.tools.source import Source, Steps


class Parser:  # D324: each character once; nothing is taken back
    """Finds the tool calls in one answer of a model, while it is written."""

    def __init__(
        self, format: ToolFormat, tools: Sequence[Tool] = (), *, max_calls: int | None = None
    ) -> None:
        """`tools`: those on offer. Formats without markers accept only calls of these."""
        self._source = Source()
        self._output = Output(format.new_id, max_calls)
        self._steps = self._read(format, {tool.name: tool.parameters for tool in tools})

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun, including those beyond `max_calls`."""
        return self._output.num_calls

    def feed(self, text: str) -> list[Event]:
        """Read the next piece of text, and return the events known by then. Never raises."""
        self._source.add(text)
        next(self._steps, None)
        return self._output.drain()

    def close(self) -> list[Event]:
        """End the text, and return the events that were held back. The parser can't be used afterwards."""
        self._source.close()
        next(self._steps, None)
        self._output.finish()
        return self._output.drain()

    def _read(self, format: ToolFormat, tools: Schemas) -> Steps[None]:
        source, output = self._source, self._output
        starts = [word for word in (*format.wraps, format.opening) if word]
        while marker := (yield from _until_marker(source, output, starts, ends=format.ends)):
            is_open = marker == format.opening
            if not is_open:  # it wraps a call
                yield from source.skip_space()
                is_open = not format.opening or (yield from source.word(format.opening))
            if not is_open or not (yield from format.read(source, output, tools)):
                yield from no_call(source, output)


def _until_marker(
    source: Source, output: Output, markers: Sequence[str], *, ends: Sequence[str]
) -> Steps[str]:
    """Show text up to a marker, and read the marker; "" at the end of the text.

    Text from the marker on is held in the source: if no call follows, it is shown. Markers of a single
    character count at the start of a line only. Markers in `ends` are left out once there was a call.
    """
    words = (*markers, *ends)
    plain = re.compile(f"[^{re.escape(''.join({word[0] for word in words}))}]+")
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
