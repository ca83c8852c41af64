"""A simulated cache over a real block manager: every slot remembers exactly whose KV was written there.

The KV of a token depends on everything before it, so what a slot should hold is a chain over (salt,
tokens up to here). Orders and writes are carried out on these chains as the cache would carry them
out on bytes. After any operation, `check` reads every position that any sequence can see.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvq.blockmgr import BlockManager, Copy, Scrub, Sequence, SwapIn, SwapOut
from kvq.errors import ConfigError, OutOfBlocks

POISON = -1  # what an unwritten, scrubbed or lost slot holds


def chain(key: int, token: int) -> int:
    """The KV of a token after a prefix whose KV is `key`."""
    return hash((key, token)) or 1


@dataclass(eq=False)
class Client:
    """One sequence as its user sees it."""

    sequence: Sequence
    salt: str
    tokens: list[int]
    keys: list[int] = field(default_factory=list)  # KV of the known tokens

    def extend(self, tokens: list[int]) -> None:
        """Learn more tokens."""
        for token in tokens:
            self.keys.append(chain(self.keys[-1] if self.keys else hash(self.salt), token))
        self.tokens += tokens

    def cut(self, length: int) -> None:
        """Forget all tokens but the first."""
        del self.tokens[length:], self.keys[length:]


class Simulation:
    """A manager, the bytes it decides about, and its clients."""

    def __init__(
        self,
        *,
        num_blocks: list[int],
        block_size: int,
        windows: list[int | None],
        host_slots: list[int],
        digest: Callable[[bytes], bytes] | None = None,
        max_clients: int = 5,
        quotas: dict[str, int] | None = None,
    ) -> None:
        options = {} if digest is None else {"digest": digest}
        self.manager = BlockManager(
            num_blocks=num_blocks,
            block_size=block_size,
            windows=windows,
            host_slots=host_slots,
            **options,
        )
        for tenant, blocks in (quotas or {}).items():
            self.manager.set_quota(tenant, blocks)
        self.size = block_size
        self.windows = windows
        self.max_clients = max_clients
        self.kv = [[POISON] * (count * block_size) for count in num_blocks]
        self.host = [[[POISON] * block_size for _ in range(count)] for count in host_slots]
        self.clients: list[Client] = []
        self.past: list[list[int]] = []  # tokens of requests that ended
        self.now = 0.0
        self.reused = 0
        self.copies = 0
        self.refused = 0

    # Operations. Each leaves manager and bytes in step; a refusal must leave everything as it was.

    def start(self, tenant: str, tokens: list[int], shared: str | None = None, reuse: bool = True) -> None:
        """A request arrives; its prefix hit is trusted from here on."""
        if len(self.clients) >= self.max_clients:
            return
        prompt = self.manager.prompt(tokens, tenant=tenant, shared_salt=shared)
        expected = self.manager.lookup(prompt).length if reuse else 0
        sequence = self.manager.start(prompt) if reuse else self.manager.start_without_reuse(prompt)
        assert sequence.length <= expected  # less only if no block was free to copy a part into
        assert sequence.length < max(1, len(tokens))
        self.reused += sequence.length
        client = Client(sequence, tenant if shared is None else f"shared {shared}", [])
        client.extend(tokens)
        self.clients.append(client)
        self.carry_out()

    def step(self, client: Client, count: int, *, drafts: int = 0) -> None:
        """Compute some known tokens and some drafts; nothing is committed yet."""
        sequence = client.sequence
        if sequence.is_swapped or sequence.committed != sequence.length:
            return
        count = min(count, len(client.tokens) - sequence.length)
        total = count + (drafts if sequence.length + count == len(client.tokens) else 0)
        can = self.manager.can_append([(sequence, total)])
        try:
            slots = self.manager.append([(sequence, total)])
        except OutOfBlocks:
            assert not can
            self.refused += 1
            return
        assert can
        self.carry_out()
        at = sequence.length - total
        for group, group_slots in enumerate(slots):
            for i, slot in enumerate(group_slots):
                known = at + i < len(client.keys)
                self.kv[group][slot] = client.keys[at + i] if known else chain(7, at + i)

    def commit(self, client: Client, sampled: list[int]) -> None:
        """The step was good; rejected drafts are dropped, and tokens sampled if the prompt is done."""
        sequence = client.sequence
        if sequence.is_swapped:
            return
        if sequence.length > len(client.tokens):
            self.manager.truncate(sequence, len(client.tokens))
        done = sequence.length == len(client.tokens)
        self.manager.commit(sequence, sampled if done else None)
        if done:
            client.extend(sampled)

    def fail(self, client: Client) -> None:
        """The step's KV held a NaN: its blocks are scrubbed, the request ends."""
        sequence = client.sequence
        if sequence.is_swapped:
            return
        for group, table in enumerate(sequence.tables):
            for p in range(sequence.committed, sequence.length):
                self.kv[group][table[p // self.size] * self.size + p % self.size] = 666
        self.manager.scrub(sequence)
        self.free(client)
        assert all(666 not in group for group in self.kv)

    def fork(self, client: Client) -> None:
        """A second continuation of the same tokens."""
        sequence = client.sequence
        if sequence.is_swapped or sequence.committed != sequence.length:
            return
        if len(self.clients) >= self.max_clients:
            return
        twin = Client(self.manager.fork(sequence), client.salt, [])
        twin.tokens, twin.keys = client.tokens[:], client.keys[:]
        self.clients.append(twin)

    def truncate(self, client: Client, length: int) -> None:
        """Rewind, if the windows allow it."""
        sequence = client.sequence
        if sequence.is_swapped:
            return
        length = min(length, sequence.length)
        try:
            self.manager.truncate(sequence, length)
        except ConfigError:
            assert any(sequence.starts)
            return
        client.cut(max(length, 0))
        if not client.tokens:
            client.extend([1])
            self.manager.commit(sequence, [1])

    def free(self, client: Client) -> None:
        """The request ends, whatever state it is in."""
        receipt = self.manager.free(client.sequence)
        assert receipt.peak <= receipt.own + receipt.shared
        self.clients.remove(client)
        self.past = [*self.past[-3:], client.tokens]
        self.carry_out()

    def swap_out(self, client: Client) -> None:
        """Preempt."""
        sequence = client.sequence
        if sequence.is_swapped or sequence.committed != sequence.length:
            return
        can = self.manager.can_swap_out(sequence)
        try:
            self.manager.swap_out(sequence)
        except OutOfBlocks:
            assert not can
            self.refused += 1
            return
        assert can
        self.carry_out()

    def swap_in(self, client: Client, lose: bool = False) -> None:
        """Resume; with `lose`, what comes back is damaged and found out."""
        sequence = client.sequence
        if not sequence.is_swapped:
            return
        can = self.manager.can_swap_in(sequence)
        try:
            self.manager.swap_in(sequence)
        except OutOfBlocks:
            assert not can
            self.refused += 1
            return
        assert can
        failed = self.carry_out(lose=lose)
        self.manager.recover(sequence, failed)

    def pin(self, client: Client, seconds: float) -> None:
        """Keep what is indexed of a client's tokens."""
        shared = client.salt.removeprefix("shared ") if client.salt.startswith("shared ") else None
        tenant = client.salt if shared is None else "a"
        prompt = self.manager.prompt(client.tokens, tenant=tenant, shared_salt=shared)
        try:
            self.manager.pin(prompt, self.now + seconds)
        except OutOfBlocks:
            self.refused += 1

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.manager.expire(self.now)

    def drop_cached(self) -> None:
        """Everything cached is evicted."""
        self.manager.drop_cached()

    def carry_out(self, *, lose: bool = False) -> list[SwapIn]:
        """Do to the simulated bytes what was ordered; return swap-ins found damaged."""
        failed = []
        size = self.size
        for order in self.manager.take_orders():
            kv = self.kv[order.group]
            if isinstance(order, Copy):
                self.copies += 1
                source, target = order.source * size, order.target * size
                assert source != target
                kv[target : target + size] = kv[source : source + size]
                continue
            at = order.block * size
            if isinstance(order, SwapOut):
                self.host[order.group][order.slot] = kv[at : at + size]
            elif isinstance(order, Scrub):
                kv[at : at + size] = [POISON] * size
            elif lose:
                kv[at : at + size] = [POISON] * size
                failed.append(order)
            else:
                kv[at : at + size] = self.host[order.group][order.slot]
        return failed

    def check(self) -> None:
        """Every invariant, and every position that a sequence can see holds that sequence's own KV."""
        self.manager.check_integrity()
        size = self.size
        for client in self.clients:
            sequence = client.sequence
            if sequence.is_swapped:
                continue
            keys = client.keys
            end = min(sequence.length, len(keys))
            for group, window in enumerate(self.windows):
                kv, table = self.kv[group], sequence.tables[group]
                first = 0 if window is None else max(0, sequence.committed - window + 1)
                for p in range(first, end):
                    held = kv[table[p // size] * size + p % size]
                    assert held == keys[p], f"position {p} of group {group} holds another's KV"

    def random_step(self, rng: random.Random, tenants: list[str], alphabet: int, longest: int) -> None:
        """One operation, chosen by `rng`."""
        roll = rng.random()
        clients = self.clients
        if roll < 0.12 or not clients:
            tokens = [rng.randrange(alphabet) for _ in range(rng.randint(1, longest))]
            if self.past and rng.random() < 0.7:  # a next turn, or the same prompt again
                tokens = (rng.choice(self.past) + tokens)[: longest + 2]
            shared = "public" if rng.random() < 0.15 else None
            self.start(rng.choice(tenants), tokens, shared, reuse=rng.random() < 0.9)
            return
        client = clients[int(rng.random() * len(clients))]
        if roll < 0.40:
            self.step(client, 1 + int(rng.random() * 4), drafts=int(rng.random() * 3))
        elif roll < 0.66:
            self.commit(client, [int(rng.random() * alphabet)])
        elif roll < 0.72:
            self.fork(client)
        elif roll < 0.77:
            self.truncate(client, int(rng.random() * (client.sequence.length + 1)))
        elif roll < 0.85:
            self.free(client)
        elif roll < 0.88:
            self.swap_out(client)
        elif roll < 0.93:
            self.swap_in(client, lose=rng.random() < 0.2)
        elif roll < 0.95:
            self.pin(client, rng.random() * 3)
        elif roll < 0.98:
            self.wait(rng.random())
        elif roll < 0.99:
            self.fail(client)
        else:
            self.drop_cached()
