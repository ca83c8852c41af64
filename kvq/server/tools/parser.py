"""Text in, events out."""

from collections.abc import Sequence

from kvq.server.tools.events import Event
from kvq.server.tools.format import Tool, ToolFormat
from kvq.server.tools.output import Output
from kvq.server.tools.source import Source


class Parser:
    """Finds the tool calls in one answer of a model, while it is written."""

    def __init__(
        self, format: ToolFormat, tools: Sequence[Tool] = (), *, max_calls: int | None = None
    ) -> None:
        """`tools`: those on offer. Formats without markers take nothing else for a call."""
        self._source = Source()
        self._output = Output(format.new_id, max_calls)
        self._steps = format.machine(self._source, self._output, tools)

    @property
    def num_calls(self) -> int:
        """Calls that began so far, those beyond `max_calls` too."""
        return self._output.num_calls

    def feed(self, text: str) -> list[Event]:
        """What is known after the next piece of text. Never raises."""
        self._source.add(text)
        next(self._steps, None)
        return self._output.drain()

    def close(self) -> list[Event]:
        """What was held back, when no more text comes. The parser can't be used after that."""
        self._source.close()
        next(self._steps, None)
        self._output.finish()
        return self._output.drain()
