"""Loading: brings the blocks of prompts back from the tiers, while their requests wait and others run.

A sequence takes the blocks of one prompt that are missing and is filled in the course of some steps. Requests
that need these blocks wait for the sequence as they wait for one that computes a prefix.
"""

from dataclasses import dataclass

from kvq.blockmgr import BlockManager, PrefixQuery, Sequence
from kvq.blockmgr.pool import BlockId
from kvq.errors import OutOfBlocks
from kvq.scheduler.costs import CostModel
from kvq.scheduler.request import Request
from kvq.tiers.tiers import BlockKey, Fetch

_SHARE = 0.1  # of a step's time for filling blocks in while others run
_LEAST_FILLED = 2  # blocks in a step
_MOST_SECONDS = 30.0  # until a disk that doesn't answer counts as a miss
_MOST_LOADS = 3  # of one request; its blocks may have been evicted again before it could start


@dataclass(slots=True, eq=False)
class _Load:
    """Sequence that is being filled."""

    sequence: Sequence
    request: Request  # for which it was begun
    missing: list[tuple[BlockId, BlockKey]]
    fetch: Fetch
    began_s: float
    num_filled: int = 0


class Loading:
    """Loads in progress, oldest first."""

    def __init__(self, manager: BlockManager, costs: CostModel) -> None:
        self._manager, self._costs = manager, costs
        self._loads: dict[bytes, _Load] = {}  # by digest of the last block
        self.loaded_tokens = 0  # since the start
        self.num_failed = 0  # loads

    def __len__(self) -> int:
        return len(self._loads)

    def begin(self, request: Request, prompt: PrefixQuery, found: int, now: float) -> Sequence | None:
        """Load what the tiers hold of a prompt beyond the first `found` tokens, if that is anything.

        Returns the sequence to wait for, or None if the request should start with what the pools have.
        """
        manager = self._manager
        length = manager.restorable(prompt)
        if length - length % manager.block_size <= found or request.num_loads >= _MOST_LOADS:
            return None
        last = manager.blocks.index.digest_at(prompt, length // manager.block_size - 1)
        if (known := self._loads.get(last)) is not None:
            return known.sequence
        try:
            sequence, missing = manager.restore(prompt, length)
        except OutOfBlocks:
            return None
        assert manager.blocks.tiers is not None, "they hold blocks"
        request.num_loads += 1
        fetch = manager.blocks.tiers.fetch([key for _, key in missing])
        self._loads[last] = _Load(sequence, request, missing, fetch, now)
        return sequence

    def advance(self, now: float, num_running: int) -> None:
        """Fill in blocks that have arrived: all of them, or some if sequences run beside."""
        left = self._most_filled(num_running)
        for last, load in list(self._loads.items()):
            if not load.fetch.is_done:
                if now - load.began_s > _MOST_SECONDS:
                    self._end(last, is_complete=False)
                continue
            while left > 0 and load.num_filled < len(load.missing):
                block, key = load.missing[load.num_filled]
                content = load.fetch.take(load.num_filled)
                if content is None:
                    break
                self._manager.fill(block, key, content)
                load.num_filled += 1
                left -= 1
            else:
                if load.num_filled == len(load.missing):
                    self._end(last, is_complete=True)
                continue
            self._end(last, is_complete=False)

    def _end(self, last: bytes, *, is_complete: bool) -> None:
        """Index a filled sequence's blocks, or drop those of one that lacks a block, and wake all waiting."""
        load = self._loads.pop(last)
        size, request = self._manager.block_size, load.request
        if is_complete:
            self._manager.commit(load.sequence)
            fetched = {key.digest: load.fetch.is_from_disk(i) for i, (_, key) in enumerate(load.missing)}
            request.disk_tokens += size * sum(fetched.values())
            request.host_tokens += size * (len(fetched) - sum(fetched.values()))
            self.loaded_tokens += size * len(fetched)
        else:
            self.num_failed += 1
        self._manager.free(load.sequence)

    def _most_filled(self, num_running: int) -> int:
        if not num_running:
            return 1 << 30
        each_s = self._costs.swap_s(1) / 2
        return max(_LEAST_FILLED, int(_SHARE * self._costs.decode_s(num_running) / each_s)) if each_s else 64
