"""What a router makes of block events, from their bytes: which blocks a replica holds."""

from array import array
from typing import Any

import msgspec


class Router:
    """One replica's blocks: {hash: (its parent's, token ids)}."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.events: list[dict[str, Any]] = []

    def take(self, content: bytes) -> None:
        """Follow a batch as vLLM writes them.

        Raises:
            AssertionError: it removes what is not held, or stores what is, or after what is not.
        """
        ts, events, rank = msgspec.msgpack.decode(content)
        assert ts > 0
        assert rank == 0
        for event in events:
            self.events.append(event)
            if event["type"] == "AllBlocksCleared":
                self.held.clear()
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    del self.held[name]
            else:
                self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        size, tokens = event["block_size"], event["token_ids"]
        assert len(tokens) == size * len(event["block_hashes"])
        parent = event["parent_block_hash"]
        for at, name in enumerate(event["block_hashes"]):
            assert name not in self.held
            self.held[name] = (parent, tuple(tokens[at * size : (at + 1) * size]))
            parent = name


def tokens_of(data: bytes) -> tuple[int, ...]:
    """Token ids from bytes."""
    return tuple(array("I", data))
