"""A subscriber that believes what events tell it."""

from kvq.blockmgr import BlockManager, Event, Evicted, Stored


class Mirror:
    """Keeps the digests of all indexed blocks, from events alone."""

    def __init__(self, manager: BlockManager) -> None:
        self.indexed: dict[tuple[int, int], bytes] = {}
        self.parents: dict[bytes, bytes] = {}
        self.faults: list[Event] = []  # a subscriber that raises is only logged, so they are kept
        self._manager = manager
        manager.subscribe(self)

    def __call__(self, event: Event) -> None:
        """Follow one event."""
        if isinstance(event, Stored):
            if (event.group, event.block) in self.indexed:
                self.faults.append(event)
            self.parents[event.digest] = event.parent
            self.indexed[event.group, event.block] = event.digest
        elif (
            isinstance(event, Evicted) and self.indexed.pop((event.group, event.block), None) != event.digest
        ):
            self.faults.append(event)

    def check(self) -> None:
        """Raise AssertionError unless the mirror knows exactly the indexed blocks."""
        assert not self.faults, f"events contradict each other: {self.faults}"
        truth = {}
        for node in self._manager.blocks.index.nodes():
            for group, block in enumerate(node.blocks):
                if block is not None:
                    truth[group, block] = node.digest
                    assert node.parent is not None
                    assert self.parents[node.digest] == node.parent.digest, "an event named a wrong parent"
        assert self.indexed == truth, "events and index differ"
