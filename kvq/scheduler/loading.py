"""Loading: brings the blocks of prompts back from the tiers, while their requests wait and others run.

A sequence takes the blocks of one prompt that are missing and is filled in the course of some steps. Requests
that need these blocks wait for the sequence as they wait for one that computes a prefix.
"""

from dataclasses import dataclass

from kvq.blockmgr import BlockManager, PrefixQuery, Sequence
from kvq.blockmgr.restore import Restore
from kvq.errors import OutOfBlocks
from kvq.scheduler.costs import CostModel
from kvq.scheduler.request import Request, RequestState
from kvq.tiers.tiers import Fetch

_SHARE = 0.05  # of a step's time for filling blocks in while others run
_DEPTH = 1024  # tokens before a block that would be computed: the estimate for the first ones may be 0
_LEAST_FILLED = 2  # blocks in a step
_MOST_SECONDS = 30.0  # until a disk that doesn't answer counts as a miss
_MOST_LOADS = 3  # of one request; its blocks may have been evicted again before it could start


@dataclass(slots=True, eq=False)
class _Load:
    """Prompt that is being restored."""

    restore: Restore
    request: Request  # for which it was begun
    fetch: Fetch | None  # of the blocks that the tiers have; the others are packed in their pools
    began_s: float
    num_filled: int = 0
    num_fetched: int = 0


class Loading:
    """Loads in progress, oldest first."""

    def __init__(self, manager: BlockManager, costs: CostModel) -> None:
        self._manager, self._costs = manager, costs
        self._loads: dict[bytes, _Load] = {}  # by digest of the last block
        self._held: dict[Request, Sequence] = {}  # loaded for requests that wait to start
        self.loaded_tokens = 0  # since the start
        self.num_failed = 0  # loads

    def __len__(self) -> int:
        return len(self._loads)

    def begin(self, request: Request, prompt: PrefixQuery, found: int, now: float) -> Sequence | None:
        """Load what is kept of a prompt beyond the first `found` tokens, if that is anything.

        Returns the sequence to wait for, or None if the request should start with what the index has.
        """
        manager = self._manager
        length = manager.below.restorable(prompt)
        if length <= found or request.num_loads >= _MOST_LOADS:
            return None
        last = manager.blocks.index.digest_at(prompt, length // manager.block_size - 1)
        if (known := self._loads.get(last)) is not None:
            return known.restore.sequence
        try:
            restore = manager.below.restore(prompt, length)
        except OutOfBlocks:  # there may be room once another prompt is there
            return next((load.restore.sequence for load in self._loads.values()), None)
        request.num_loads += 1
        below = [key for _, key in restore.missing if key not in restore.packed]
        tiers = manager.blocks.tiers
        fetch = tiers.fetch(below) if tiers is not None and below else None
        self._loads[last] = _Load(restore, request, fetch, now)
        return restore.sequence

    def let_go(self, request: Request) -> None:
        """Let others evict what was loaded for a request that has started or ended."""
        if (sequence := self._held.pop(request, None)) is not None:
            self._manager.free(sequence)

    def abandon(self) -> None:
        """Give up all loads, since orders may be lost."""
        for last in list(self._loads):
            self._end(last, is_complete=False)
        while self.give_back():
            pass

    def give_back(self) -> bool:
        """Let others evict what was loaded for a waiting request. Return False if there is nothing."""
        for request in self._held:
            self.let_go(request)
            return True
        return False

    def advance(self, now: float, num_running: int) -> None:
        """Fill in blocks that have arrived: all of them, or some if sequences run beside.

        Also decide whether a ladder saves time: packing and unpacking should take less than computing.
        """
        computing_s = self._manager.block_size * self._costs.prefill_token_s(_DEPTH)
        self._manager.blocks.ladder.is_worth = self._costs.move_s(1) < computing_s
        left = self._most_filled(num_running)
        for last, load in list(self._loads.items()):
            if load.fetch is not None and not load.fetch.is_done:
                if now - load.began_s > _MOST_SECONDS:
                    self._end(last, is_complete=False)
                continue
            while left > 0 and load.num_filled < len(load.restore.missing):
                if not self._fill_next(load):
                    self._end(last, is_complete=False)
                    break
                left -= 1
            if last in self._loads and load.num_filled == len(load.restore.missing):
                self._end(last, is_complete=True)

    def _fill_next(self, load: _Load) -> bool:
        """Fill the next block. Return False if its content is lost."""
        _, key = load.restore.missing[load.num_filled]
        if key in load.restore.packed:
            self._manager.below.fill(load.restore, load.num_filled)
        else:
            found = None if load.fetch is None else load.fetch.take(load.num_fetched)
            if found is None:
                return False
            self._manager.below.fill(load.restore, load.num_filled, *found)
            load.num_fetched += 1
        load.num_filled += 1
        return True

    def _end(self, last: bytes, *, is_complete: bool) -> None:
        """Index a load's blocks, or drop those of one that lacks a block, and wake all who wait for it."""
        load = self._loads.pop(last)
        self._manager.below.end(load.restore, is_complete=is_complete)
        if not is_complete:
            self.num_failed += 1
            return
        request = load.request
        waits = request.state in (RequestState.WAITING, RequestState.PREEMPTED)
        if request.branches and waits and request not in self._held:
            self._held[request] = load.restore.sequence
        else:
            self._manager.free(load.restore.sequence)
        fetched = {}
        if load.fetch is not None:
            fetched = {key.digest: load.fetch.is_from_disk(i) for i, key in enumerate(load.fetch.keys)}
        size, on_disk = self._manager.block_size, sum(fetched.values())
        if request.preemptions:
            request.usage.restored += size * len(fetched)
        else:
            request.disk_tokens += size * on_disk
            request.host_tokens += size * (len(fetched) - on_disk)
        self.loaded_tokens += size * len({key.digest for _, key in load.restore.missing})

    def _most_filled(self, num_running: int) -> int:
        if not num_running:
            return 1 << 30
        each_s = self._costs.move_s(1) / 2
        return max(_LEAST_FILLED, int(_SHARE * self._costs.decode_s(num_running) / each_s)) if each_s else 64
