"""Stored responses of the Responses API, with their conversations, in memory."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from kvq.server.http.problems import Problem
from kvq.server.responses.bodies import ITEM, ItemReference

_OVERHEAD = 64  # bytes of a Python object, and of references to it
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


class Entry(NamedTuple):
    """Response with its conversation, as JSON."""

    items: list[bytes]  # the whole conversation, with the response's output; shared with later responses
    response: bytes
    output: Mapping[str, bytes]  # the last items, by id

    @property
    def num_bytes(self) -> int:
        """Size, as if no item was shared."""
        return len(self.response) + sum(len(item) + _OVERHEAD for item in self.items)

    def input_items(self, id: str) -> list[dict[str, Any]]:
        """Return the items before the output of the response `id`, oldest first, all with ids."""
        items = [*map(msgspec.json.decode, self.items[: len(self.items) - len(self.output)])]
        for at, item in enumerate(items):
            item.setdefault("id", f"{_PREFIXES[item['type']]}_{id.removeprefix('resp_')}_{at}")
            item.setdefault("status", "completed")
            if item["type"] == "message" and isinstance(item["content"], str):
                kind = "output_text" if item["role"] == "assistant" else "input_text"
                item["content"] = [{"type": kind, "text": item["content"]}]
        return items


class Kept:
    """Responses of each tenant, least recently used first; the tenant with the most bytes makes room."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._of: dict[str, dict[str, Entry]] = {}  # by tenant and id
        self._num_bytes = Counter[str]()  # by tenant

    def find(self, tenant: str, id: str, param: str = "response_id") -> Entry:
        """Return a response, which becomes the most recently used; raise Problem if it is not there."""
        entry = self.drop(tenant, id, param)
        self._add(tenant, id, entry)
        return entry

    def put(self, tenant: str, id: str, entry: Entry) -> None:
        """Keep a response, unless it is too large, and drop others until all are within the limits."""
        if self._most and entry.num_bytes <= self._most_bytes:
            self._add(tenant, id, entry)
        while self._num_bytes.total() > self._most_bytes or sum(map(len, self._of.values())) > self._most:
            fullest = max(self._num_bytes, key=self._num_bytes.__getitem__)
            self.drop(fullest, next(iter(self._of[fullest])))

    def drop(self, tenant: str, id: str, param: str = "response_id") -> Entry:
        """Remove and return a response; raise Problem if it is not there."""
        if (entry := self._of.get(tenant, {}).pop(id, None)) is None:
            words = "was never stored, was deleted, or made room for others"
            remedy = "send the whole conversation as input, without previous_response_id"
            message = f"no response {id!r:.100} here: it {words}; {remedy}"
            raise Problem(404, message, code="response_not_found", param=param)
        self._num_bytes[tenant] -= entry.num_bytes
        return entry

    def _add(self, tenant: str, id: str, entry: Entry) -> None:
        self._of.setdefault(tenant, {})[id] = entry
        self._num_bytes[tenant] += entry.num_bytes

    def resolved(self, tenant: str, item: Any) -> Any:  # D434: outputs only
        """Return an item, or the one that it refers to: of the output of a response that is kept.

        Raises:
            Problem: no response has it.
        """
        if not isinstance(item, ItemReference):
            return item
        found = (
            entry.output[item.id] for entry in self._of.get(tenant, {}).values() if item.id in entry.output
        )
        if (content := next(found, None)) is None:
            words = f"no stored response has an output item {item.id!r:.100}; send the item itself"
            raise Problem(404, words, code="item_not_found", param="input")
        return ITEM.validate_json(content)
