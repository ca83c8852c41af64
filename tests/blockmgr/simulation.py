"""A simulated cache over a real block manager: every slot remembers exactly whose KV was written there.

The KV of a token depends on everything before it, so what a slot should hold is a chain over (salt,
tokens up to here). Orders and writes are carried out on these chains as the cache would carry them
out on bytes. After any operation, `check` reads every position that any sequence can see.
"""

import random
from array import array
from collections import Counter
from collections.abc import Iterator

from kvq.blockmgr import (
    BlockManager,
    Copy,
    Demote,
    Fill,
    Match,
    PrefixQuery,
    Scrub,
    Sequence,
)
from kvq.blockmgr.packed.ladder import Pack, Packed
from kvq.errors import ConfigError, OutOfBlocks
from tests.blockmgr.client import Client
from tests.blockmgr.mirror import Mirror
from tests.blockmgr.oracle import hit_length

POISON = -1  # what an unwritten, scrubbed or lost slot holds
BROKEN = -2  # what a failed step wrote


class Simulation:
    """A manager, the bytes it decides about, and its clients."""

    def __init__(self, manager: BlockManager, *, max_clients: int = 5, mirrored: bool = True) -> None:
        self.manager = manager
        self.size = manager.block_size
        self.windows, self.limits = manager.blocks.windows, manager.blocks.limits
        self.is_staged = any(self.limits)  # groups: sealed blocks, recent tokens, the first tokens
        window = self.windows[0]
        self.seals = window is None or window > manager.blocks.lag  # else blocks leave it before they are old
        self.states = manager.blocks.state_group
        self.max_clients = max_clients
        self.kv = [[[POISON] * self.size for _ in range(pool.num_blocks)] for pool in manager.pools]
        self.aside = random.Random(0)  # for what is tried in between
        self.packed: dict[int, list[list[int]]] = {}
        self.mirror = Mirror(manager) if mirrored else None
        self.clients: list[Client] = []
        self.away: list[Client] = []  # preempted
        self.past: list[list[int]] = []  # tokens of requests that ended
        self.now = 0.0
        self.surprised = False  # refusals are injected, so answers may turn out wrong
        self.seen: Counter[str] = Counter()  # how often which path was taken

    # Operations. Each leaves manager and bytes in step; a refusal must leave everything as it was.

    def start(self, tenant: str, tokens: list[int], shared: str | None = None, reuse: bool = True) -> None:
        """A request arrives; its prefix hit is trusted from here on."""
        prompt = self.manager.prompt(tokens, tenant=tenant, shared_salt=shared)
        match = self.manager.lookup(prompt)
        assert match.length == hit_length(self.manager, prompt)
        self._check_wait(match, tokens, prompt)
        prompt.max_reuse = None if reuse else 0
        sequence = self.manager.start(prompt)
        expected = match.length if reuse else 0
        whole = expected // self.size * self.size
        assert sequence.length in (expected, min(expected, whole))  # the part needs a free block
        assert sequence.length <= max(0, len(tokens) - 1)
        self.seen["hits"] += sequence.length >= self.size
        self.seen["parts"] += sequence.length % self.size > 0
        self._check_miss(sequence, prompt)
        self._welcome(sequence, prompt, tokens, shared)

    def _check_miss(self, sequence: Sequence, prompt: PrefixQuery) -> None:
        """Whatever happened before, a miss is at a token of the prompt that was not reused."""
        miss = self.manager.misses.explain(prompt, sequence)
        if miss is None:
            return
        self.seen[f"miss: {miss.cause}"] += 1
        assert miss.token < len(prompt.tokens)
        assert 0 <= miss.lost_tokens <= len(prompt.tokens)
        assert miss.token >= sequence.length or miss.cause == "no_snapshot"
        if miss.cause == "limit":
            assert prompt.max_reuse == miss.token

    def _check_wait(self, match: Match, tokens: list[int], prompt: PrefixQuery) -> None:
        """Whoever is waited for has the next block among its tokens, and has yet to commit it."""
        other = match.waits_for
        if other is not None:
            self.seen["waits"] += 1
            depth = match.length // self.size
            depth = self.manager.prefixes.next_known(prompt, depth)
            end = (depth + 1) * self.size
            assert other in self.manager.sequences()
            assert other.depth <= depth
            assert list(other.tokens[:end]) == tokens[:end]
            assert other.node.root == prompt.root

    def adopt(self, tenant: str, tokens: list[int], num_blocks: int) -> None:
        """A request arrives with the KV of its first blocks from elsewhere."""
        prompt = self.manager.prompt(tokens, tenant=tenant)
        try:
            sequence = self.manager.adopt(prompt, num_blocks * self.size)
        except OutOfBlocks:
            self.seen["refused adopt"] += 1
            return
        self.seen["adopted"] += 1
        client = self._welcome(sequence, prompt, tokens, None)
        for group, (table, start) in enumerate(zip(sequence.tables, sequence.starts, strict=True)):
            for i in range(start, len(table)):
                keys = client.keys[i * self.size : (i + 1) * self.size]
                self.kv[group][table[i]] = keys[-1:] * self.size if group == self.states else keys

    def restore(self, tenant: str, tokens: list[int], lost: int, shared: str | None = None) -> None:
        """What is kept of a prompt comes back, unless block number `lost` of them is damaged."""
        prompt = self.manager.prompt(tokens, tenant=tenant, shared_salt=shared)
        length, found = self.manager.below.restorable(prompt), self.manager.lookup(prompt).length
        assert length % self.size == 0
        if length <= found:
            return
        try:
            restore = self.manager.below.restore(prompt, length)
        except OutOfBlocks:
            self.seen["refused restore"] += 1
            return
        assert restore.missing, "it was no hit before"
        tiers = self.manager.blocks.tiers
        below = [i for i, (_, key) in enumerate(restore.missing) if key not in restore.packed]
        is_lost = False
        if below:
            assert tiers is not None
            fetch = tiers.fetch([restore.missing[i][1] for i in below])
            if is_lost := lost < len(below):
                held = fetch._held[lost]
                assert held is not None
                held.digest = b"damaged"
            for at, i in enumerate(below):
                found = fetch.take(at)
                assert (found is None) == (is_lost and at == lost)
                if found is not None:
                    self.manager.below.fill(restore, i, *found)
        for i, (_, key) in enumerate(restore.missing):
            if key in restore.packed:
                self.manager.below.fill(restore, i)
                self.seen["unpacked"] += 1
        self.manager.check_integrity()
        self.manager.below.end(restore, is_complete=not is_lost)
        if not is_lost:
            self.manager.free(restore.sequence)
        self.carry_out()
        again = self.manager.lookup(self.manager.prompt(tokens, tenant=tenant, shared_salt=shared)).length
        assert again >= length or is_lost or not restore.sequence.indexing
        self.seen["restore lost" if is_lost else "restored"] += 1

    def give_up(self, tenant: str, tokens: list[int], *, to_tiers: bool) -> None:
        """A client says that a prompt is not needed for some time."""
        self.manager.below.give_up(self.manager.prompt(tokens, tenant=tenant), to_tiers=to_tiers)
        self.carry_out()

    def _content(self, group: int, source: int | Packed) -> list[int]:
        """What a block or a packed block holds."""
        if not isinstance(source, Packed):
            return self.kv[group][source]
        number = self.kv[group][source.blocks[0]][0]
        assert all(self.kv[group][block] == [number] * self.size for block in source.blocks), "overwritten"
        return self.packed[number][source.slot]

    def _pack(self, order: Pack) -> None:
        """Rewrite blocks; the targets hold a number of what was packed there."""
        contents = [self._content(order.group, source)[:] for source in order.sources]
        number = -1000 - len(self.packed)
        self.packed[number] = contents
        for block in order.targets:
            self.kv[order.group][block] = [number] * self.size
        self.seen["packed" if order.rung == 1 else "packed again"] += 1

    def _welcome(
        self, sequence: Sequence, prompt: PrefixQuery, tokens: list[int], shared: str | None
    ) -> Client:
        client = Client(sequence, prompt.tenant, shared)
        client.extend(tokens)
        self.clients.append(client)
        self.seen["requests"] += 1
        self.carry_out()
        return client

    def step(self, work: list[tuple[Client, int, list[int]]]) -> bool:
        """Compute known tokens and drafts of some clients, if there is room; nothing is committed yet."""
        todo = []
        for client, count, drafts in work:
            count = min(count, len(client.tokens) - client.sequence.length)
            ends = client.sequence.length + count == len(client.tokens)
            todo.append((client, count, drafts if ends and self.states is None else []))
        request = [(client.sequence, count + len(drafts)) for client, count, drafts in todo]
        can = self.manager.can_append(request)
        copies = self.seen["copies"]
        try:
            slots = self.manager.append(request)
        except OutOfBlocks:
            assert not can or self.surprised
            self.seen["refused"] += 1
            return False
        assert can or self.surprised
        self.carry_out()
        self.seen["copies on write"] += self.seen["copies"] - copies
        if self.states is not None:
            for client, count, _ in todo:
                self._read_state(client, count)
        for group, row in enumerate(slots):
            if group == self.states:
                assert not row
            elif not self.is_staged or group == 1:
                self._write(group, iter(row), todo)
            elif (limit := self.limits[group]) is not None:
                places = [p for client, *new in todo for p in self._places(client, *new)]
                assert [slot == -1 for slot in row] == [p >= limit for p in places]
                self.seen["beyond a limit"] += row.count(-1)
        if self.is_staged and self.seals:
            self._seal(todo)
        for client, _, drafts in todo:
            client.drafts = drafts
        return True

    def _write(self, group: int, slots: Iterator[int], todo: list[tuple[Client, int, list[int]]]) -> None:
        blocks, size = self.kv[group], self.size
        for client, count, drafts in todo:
            at = self._places(client, count, drafts).start
            for key in client.keys[at : at + count] + client.keys_of(drafts):
                slot = next(slots)
                blocks[slot // size][slot % size] = key
        assert next(slots, None) is None

    def _read_state(self, client: Client, count: int) -> None:
        """A step reads the state before its tokens, and is to write those after some of them."""
        move, sequence = client.sequence.move, client.sequence
        if not count:
            return
        assert move is not None
        assert self.states is not None
        assert move.start == sequence.length - count
        if move.start:
            assert self.kv[self.states][move.source] == [client.keys[move.start - 1]] * self.size
        at, client.states = move.start, []
        for tokens, block in move.pieces:
            assert tokens
            at += tokens
            client.states.append((block, at))
            assert self.manager.pools[self.states].is_writable(block)
        assert at == sequence.length
        self.seen["snapshots"] += len(move.pieces) - 1
        self.seen["states stayed"] += move.pieces[0][1] != move.source and move.start > 0

    def _write_states(self, client: Client) -> None:
        for block, at in client.states:
            assert self.states is not None
            self.kv[self.states][block] = [client.keys[at - 1]] * self.size
        client.states = []

    def _places(self, client: Client, count: int, drafts: list[int]) -> range:
        """The positions of a step's tokens, which the sequence has room for."""
        return range(client.sequence.length - count - len(drafts), client.sequence.length)

    def _seal(self, todo: list[tuple[Client, int, list[int]]]) -> None:
        """Blocks that the step made old enough are sealed; the first ones stay as they are."""
        sealed, recent, first = self.kv[:3]
        for client, count, drafts in todo:
            tables, length = client.sequence.tables, client.sequence.length
            for i in range(
                self._edge(length - count - len(drafts)) // self.size, self._edge(length) // self.size
            ):
                content = recent[tables[1][i]][:]
                if i * self.size < self.limits[2]:
                    first[tables[2][i]] = content
                else:
                    sealed[tables[0][i]] = content
                self.seen["sealed"] += 1

    def _edge(self, length: int) -> int:
        """The first token of so many that is not old enough."""
        return max(0, length - self.manager.blocks.lag) // self.size * self.size

    def _reach(self, group: int, length: int) -> tuple[int, int]:
        """The positions whose KV a group holds, the window aside."""
        limit = self.limits[group]
        if not self.is_staged:
            return 0, length
        if group == 1:
            return 0, length
        end = self._edge(length) if self.seals else 0
        first_ones = self.limits[2]
        return (first_ones, end) if limit is None else (0, min(limit, end))

    def commit(self, client: Client, accept: int, sampled: list[int]) -> None:
        """The step was good: some drafts are accepted, the others dropped, and tokens may be sampled."""
        sequence = client.sequence
        done = sequence.length >= len(client.tokens)
        news = client.drafts[:accept] if done else []
        if len(news) < len(client.drafts):
            self.manager.truncate(sequence, len(client.tokens) + len(news))
            self.seen["drafts rejected"] += 1
        self.seen["drafts accepted"] += len(news)
        client.drafts = []
        if done:
            news = news + sampled
            client.extend(news)
        self._write_states(client)
        before = [table[:] for table in sequence.tables]
        was_indexing = sequence.indexing
        self.manager.commit(sequence, news if done else None)
        self.seen["collisions"] += was_indexing and not sequence.indexing
        for table, old, start in zip(sequence.tables, before, sequence.starts, strict=True):
            self.seen["deduplicated"] += sum(a != b for a, b in zip(table[start:], old[start:], strict=True))
            self.seen["window moved"] += table[:start] != old[:start]

    def fail(self, client: Client) -> None:
        """The step's KV held a NaN: its blocks are scrubbed, the request ends."""
        sequence, size = client.sequence, self.size
        for group, (table, start) in enumerate(zip(sequence.tables, sequence.starts, strict=True)):
            if group == self.states:
                for block, _ in client.states:
                    self.kv[group][block] = [BROKEN] * size
                continue
            for p in range(max(sequence.committed, start * size), min(sequence.length, len(table) * size)):
                self.kv[group][table[p // size]][p % size] = BROKEN
        self.manager.scrub(sequence)
        self.free(client)
        self.seen["failed"] += 1
        assert not any(BROKEN in block for group in self.kv for block in group)

    def fork(self, client: Client) -> None:
        """A second continuation of the same tokens."""
        twin = Client(self.manager.fork(client.sequence), client.tenant, client.shared)
        twin.tokens, twin.keys = client.tokens[:], client.keys[:]
        self.clients.append(twin)
        self.seen["forked"] += 1

    def truncate(self, client: Client, length: int) -> None:
        """Rewind, if the windows allow it."""
        was = client.sequence.length
        try:
            self.manager.truncate(client.sequence, length)
        except ConfigError:
            assert any(client.sequence.starts) or self.states is not None
            self.seen["rewinds refused"] += 1
            return
        client.states = [(block, at) for block, at in client.states if at <= length == was]
        self.seen["rewound"] += 1
        client.drafts = client.drafts[: max(0, length - len(client.tokens))]
        client.cut(length)
        if not length:
            client.extend([1])
            self.manager.commit(client.sequence, [1])

    def free(self, client: Client) -> None:
        """The request ends, whatever state it is in."""
        receipt = self.manager.free(client.sequence)
        assert receipt.peak <= receipt.own + receipt.shared
        self.clients.remove(client)
        self.past = [*self.past[-3:], client.tokens]
        self.carry_out()

    def preempt(self, client: Client) -> None:
        """The request loses its blocks, and waits."""
        self.free(client)
        self.away.append(client)
        self.seen["preempted"] += 1

    def resume(self, client: Client) -> None:
        """A preempted request starts again, from what is still indexed of all its tokens or was restored."""
        self.away.remove(client)
        self.start(client.tenant, client.tokens, client.shared)
        self.seen["resumed"] += 1
        self.seen["found again"] += self.clients[-1].sequence.length >= self.size

    def pin(self, client: Client, seconds: float) -> None:
        """Keep what is indexed of a client's tokens."""
        prompt = self.manager.prompt(client.tokens, tenant=client.tenant, shared_salt=client.shared)
        try:
            self.seen["pinned"] += self.manager.pin(prompt, self.now + seconds) > 0
        except OutOfBlocks:
            self.seen["refused pin"] += 1

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.seen["pins expired"] += self.manager.expire(self.now)

    def grow(self, more: int) -> None:
        """The pools get more blocks."""
        self.manager.grow([pool.num_blocks + more for pool in self.manager.pools])
        for kv in self.kv:
            kv.extend([POISON] * self.size for _ in range(more))

    def carry_out(self) -> None:
        """Do to the simulated bytes what was ordered."""
        for order in self.manager.take_orders():
            kv = self.kv[order.group]
            if isinstance(order, Copy):
                self.seen["copies"] += 1
                assert order.source != order.target
                kv[order.target] = kv[order.source][:]
            elif isinstance(order, Demote):
                assert self.manager.blocks.tiers is not None
                content = self._content(order.group, order.source)
                self.manager.blocks.tiers.put(order.key, array("q", content).tobytes(), order.form)
                self.seen["demoted"] += 1
            elif isinstance(order, Pack):
                self._pack(order)
            elif isinstance(order, Fill):
                if isinstance(order.content, Packed):
                    kv[order.block] = self._content(order.group, order.content)[:]
                else:
                    kv[order.block] = array("q", order.content).tolist()
            else:
                assert isinstance(order, Scrub)
                kv[order.block] = [POISON] * self.size

    def check(self) -> None:
        """Every invariant, and every position that a sequence can see holds that sequence's own KV."""
        self.manager.check_integrity()
        if self.mirror is not None:
            self.mirror.check()
        for client in self.clients:
            self._check_kv(client)

    def _check_kv(self, client: Client) -> None:
        sequence, size = client.sequence, self.size
        keys = client.keys + client.keys_of(client.drafts)
        end = min(sequence.length, len(keys))
        assert end == sequence.length, "a slot for a token that nobody knows"
        length = end
        for group, window in enumerate(self.windows):
            kv, table = self.kv[group], sequence.tables[group]
            if group == self.states:
                self._check_states(client, kv)
                continue
            start, end = self._reach(group, length)
            first = start if window is None else max(start, sequence.committed - window + 1)
            if not sequence.committed:
                first = max(first, sequence.starts[group] * size)  # adopted, only the last window
            if first >= end:
                continue
            at = first - first % size
            held = [key for block in table[first // size :] for key in kv[block]]
            assert held[first - at : end - at] == keys[first:end], f"group {group} holds another's KV"

    def _check_states(self, client: Client, kv: list[list[int]]) -> None:
        """The newest state is there, or the one that a step goes on from, and snapshots are theirs."""
        sequence, group, size = client.sequence, client.sequence.state_group, self.size
        table = sequence.tables[group]
        coming = {block for block, _ in client.states}
        if sequence.length and not client.states:
            assert kv[table[-1]] == [client.keys[sequence.length - 1]] * size, "another's state"
        for i in range(sequence.starts[group], sequence.length // size):
            if sequence.holds(group, i) and table[i] not in coming:
                assert kv[table[i]] == [client.keys[(i + 1) * size - 1]] * size, "another's snapshot"

    def close(self) -> None:
        """End everything; nothing may be left anywhere."""
        manager = self.manager
        for client in self.clients[:]:
            self.free(client)
        manager.expire(float("inf"))
        manager.drop_cached()
        self.check()
        assert all(usage.free == usage.total for usage in manager.usage())
        assert not len(manager.blocks.index)
        assert not list(manager.blocks.index.roots())
        assert not manager.prefixes.computing()
        assert not manager.take_orders()
