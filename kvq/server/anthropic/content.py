"""An answer's content, block by block, and the events that tell of it."""

import json
from typing import Any

from kvq.server.tools import CallArguments, CallStart, Parser, Text
from kvq.server.tools import Event as Found

Event = dict[str, Any]


class Content:
    """The blocks of an answer while it is written."""

    def __init__(self, parser: Parser | None) -> None:
        """Without a parser all is text."""
        self.blocks: list[dict[str, Any]] = []
        self._parser = parser
        self._arguments: list[str] = []  # of the last block, if it is a call
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        """True if the answer calls a tool."""
        return any(block["type"] == "tool_use" for block in self.blocks)

    def feed(self, text: str) -> list[Event]:
        """Go on with the answer; what there is to tell of it."""
        found = [Text(text)] if self._parser is None else self._parser.feed(text)
        return [event for one in found for event in self._take(one)]

    def close(self) -> list[Event]:
        """End the answer."""
        found = [] if self._parser is None else self._parser.close()
        return [*(event for one in found for event in self._take(one)), *self._stop()]

    def _take(self, found: Found) -> list[Event]:
        if isinstance(found, CallStart):
            return self._start({"type": "tool_use", "id": found.id, "name": found.name, "input": {}})
        if isinstance(found, CallArguments):
            self._arguments.append(found.text)
            return [self._delta({"type": "input_json_delta", "partial_json": found.text})]
        if not found.text:
            return []
        is_text = self._is_open and self.blocks[-1]["type"] == "text"
        started = [] if is_text else self._start({"type": "text", "text": ""})
        self.blocks[-1]["text"] += found.text
        return [*started, self._delta({"type": "text_delta", "text": found.text})]

    def _start(self, block: dict[str, Any]) -> list[Event]:
        stopped = self._stop()
        self.blocks.append(block)
        self._is_open = True
        started = {
            "type": "content_block_start",
            "index": len(self.blocks) - 1,
            "content_block": dict(block),
        }
        return [*stopped, started]

    def _stop(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        if self.blocks[-1]["type"] == "tool_use":
            self.blocks[-1]["input"] = _object("".join(self._arguments))
            self._arguments.clear()
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _object(text: str) -> dict[str, Any]:
    """Arguments as the object that they are; empty if the model wrote something else, or was broken off."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
