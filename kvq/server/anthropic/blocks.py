"""An answer's content, block by block, and the events that tell of it."""

from typing import Any

Event = dict[str, Any]


class Content:
    """The blocks of an answer while it is written."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []

    def feed(self, text: str) -> list[Event]:
        """Go on with the answer; what there is to tell of it."""
        if not text:
            return []
        started = [] if self.blocks else self._start({"type": "text", "text": ""})
        self.blocks[-1]["text"] += text
        return [*started, self._delta({"type": "text_delta", "text": text})]

    def close(self) -> list[Event]:
        """End the answer."""
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}] if self.blocks else []

    def _start(self, block: dict[str, Any]) -> list[Event]:
        self.blocks.append(block)
        return [{"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}
