"""Prefix hits: which tokens of a prompt are cached in every layer group, and which are being computed.

`find` implements the rule for a hit that is valid in every layer group. `Prefixes` publishes sequences'
blocks in the prefix index and records which running sequence computes which prefix.
"""

from bisect import bisect_left
from dataclasses import dataclass

from kvq.blockmgr.blocks import Blocks
from kvq.blockmgr.events import Copy, Stored
from kvq.blockmgr.pool import BlockId
from kvq.blockmgr.prefix import TOKEN_BYTES, Node, PrefixQuery
from kvq.blockmgr.sequence import Sequence, tables_of
from kvq.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """Complete blocks of a prompt found in the index, and a block that starts with the tokens after them."""

    nodes: list[Node]  # of the complete blocks, starting after the root
    part: Node | None  # a block whose first tokens come next in the prompt; it is copied
    length: int  # tokens, including those of the part


@dataclass(frozen=True, slots=True)
class Match:
    """Length of a prompt's hit, and the sequence to wait for."""

    length: int  # tokens that need not be computed
    waits_for: Sequence | None  # it is computing the following tokens now, so waiting saves work


def find(blocks: Blocks, prompt: PrefixQuery, max_tokens: int) -> Hit:
    """Return the longest valid hit of at most `max_tokens` tokens. Changes nothing.

    A hit of length L is valid if full-attention groups hold all of [0, L), groups with a limit hold all
    tokens of the hit below their limit, sliding-window groups hold the part that a token at position L sees,
    and the group of recurrent states holds the state after L tokens.
    """
    check_prompt(blocks, prompt)
    size = blocks.block_size
    walked = blocks.index.walk(prompt, max_tokens // size)
    depth = _valid_depth(blocks, walked)
    nodes = walked[:depth]
    parent = nodes[-1] if nodes else blocks.index.root(prompt.root)
    start = depth * size
    if blocks.states is not None:  # states are kept for whole blocks only
        return Hit(nodes=nodes, part=None, length=start)
    rest = prompt.data[start * TOKEN_BYTES : min(start + size, max_tokens) * TOKEN_BYTES]
    part, common = blocks.index.best_child(parent, rest, blocks.num_groups_at(depth))
    return Hit(nodes=nodes, part=part, length=start + common)


def needed_blocks(blocks: Blocks, nodes: list[Node], length: int) -> tuple[list[int], list[list[BlockId]]]:
    """Return the complete blocks of a valid hit that a token at position `length` needs.

    Returns the index of the first block and the blocks from this index on, both by layer group.
    """
    starts, held = [], []
    for group in range(len(blocks.pools)):
        start = min(blocks.first_seen(group, length), len(nodes))
        end = blocks.entries(group, len(nodes) * blocks.block_size)
        found = [block for node in nodes[start:end] if (block := node.blocks[group]) is not None]
        assert start + len(found) == end, "a valid hit holds every block"
        starts.append(start)
        held.append(found)
    return starts, held


def check_prompt(blocks: Blocks, prompt: PrefixQuery) -> None:
    """Raise ConfigError if a prompt was prepared for another block size, since its digests can't match."""
    if prompt.block_size != blocks.block_size:
        raise ConfigError(
            f"the prompt was prepared for blocks of {prompt.block_size} tokens, these have "
            f"{blocks.block_size}; prepare it with this manager's prompt()"
        )


def _valid_depth(blocks: Blocks, nodes: list[Node]) -> int:
    """Return the largest number of leading nodes that form a valid hit."""
    depth = len(nodes)
    sliding = []
    for group, window in enumerate(blocks.windows):
        if window is None:
            end = blocks.entries(group, depth * blocks.block_size)
            depth = next((i for i, n in enumerate(nodes[:end]) if n.blocks[group] is None), depth)
        else:
            sliding.append(group)
    if not sliding:
        return depth
    best = 0
    run = [0] * len(blocks.windows)  # consecutive blocks that are present, up to the previous node
    for i, node in enumerate(nodes[:depth], start=1):
        length = i * blocks.block_size
        valid = True
        for group in sliding:
            run[group] = run[group] + 1 if node.blocks[group] is not None else 0
            valid = valid and run[group] >= i - blocks.first_seen(group, length)
        if valid:
            best = i
    return best


class Prefixes:
    """Indexed prefixes of sequences, and prefixes that running sequences are going to index."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._computing: dict[bytes, Sequence] = {}  # by digest of a prompt block

    def hit(self, prompt: PrefixQuery) -> Hit:
        """Return the longest hit that leaves at least one token to compute. Changes nothing.

        It ends before more blocks than `Blocks.cold_share` allows were stored in fewer bits.
        """
        most, blocks = most_reused(prompt), self._blocks
        found = find(blocks, prompt, most)
        if blocks.cold_share < 1:
            cold = [i for i, node in enumerate(found.nodes) if node.coldest]
            if len(cold) > (allowed := most_cold(blocks, prompt)):
                return find(blocks, prompt, cold[allowed] * blocks.block_size)
        return found

    def held(self, prompt: PrefixQuery) -> tuple[int, list[int], list[list[BlockId]]]:
        """Return the longest hit in complete blocks as (length, starts, tables by group). Changes nothing."""
        nodes = self.whole(prompt)
        length = len(nodes) * self._blocks.block_size
        starts, held = needed_blocks(self._blocks, nodes, length)
        return length, starts, tables_of(starts, held)

    def whole(self, prompt: PrefixQuery) -> list[Node]:
        """Return the nodes of the longest hit in complete blocks, up to the full prompt. Changes nothing."""
        return find(self._blocks, prompt, len(prompt.tokens)).nodes

    def match(self, prompt: PrefixQuery) -> Match:
        """Return the hit's length, and the sequence that is computing the next block. Changes nothing."""
        hit = self.hit(prompt)
        i, size = self.next_known(prompt, len(hit.nodes)), self._blocks.block_size
        end = (i + 1) * size
        if end > most_reused(prompt):
            return Match(hit.length, None)
        owner = self._computing.get(self._blocks.index.digest_at(prompt, i))
        if owner is None or owner.depth > i or owner.node.root != prompt.root:
            return Match(hit.length, None)
        if self._blocks.states is not None and not self._blocks.states.keeps(owner, i):
            return Match(hit.length, None)
        same = owner.tokens[:end].tobytes() == prompt.data[: end * TOKEN_BYTES]
        return Match(hit.length, owner if same else None)

    def next_known(self, prompt: PrefixQuery, index: int) -> int:
        """Return the first block index >= `index` that extends the hit; not every state is kept."""
        states = self._blocks.states
        if states is None:
            return index
        size = self._blocks.block_size
        periodic = -(-(index + 1) * size // states.every) * states.every // size - 1
        tail = most_reused(prompt) // size - 1
        return tail if index <= tail < periodic else periodic

    def can_start(self, prompt: PrefixQuery, count: int, *, spare: list[int]) -> bool:
        """Return True if the pools have enough blocks for a prompt's hit, `count` more tokens and `spare`.

        `spare`: number of blocks per layer group that must stay free. Changes nothing.
        """
        hit, blocks = self.hit(prompt), self._blocks
        whole = len(hit.nodes) * blocks.block_size
        _, held = needed_blocks(blocks, hit.nodes, whole)
        demand = []
        for group in range(len(held)):
            need = blocks.entries(group, hit.length + count) - blocks.entries(group, whole)
            if blocks.states is not None and group == blocks.states.group:
                need = min(need, 1)
            demand.append(need)
        return blocks.can_take(demand, beside=held, spare=spare)

    def computing(self) -> dict[bytes, Sequence]:
        """Return the digests of blocks that are being computed, mapped to the sequences that compute them."""
        return dict(self._computing)

    def announce(self, sequence: Sequence, prompt: PrefixQuery) -> None:
        """Announce the full prompt blocks that a sequence has yet to compute, so that requests can wait."""
        known = max(0, len(prompt.tokens) - self._blocks.lag)
        for i in reversed(range(sequence.depth, known // self._blocks.block_size)):
            digest = self._blocks.index.digest_at(prompt, i)
            if digest not in self._computing:
                self._computing[digest] = sequence
                sequence.announced.append((i, digest))

    def withdraw(self, sequence: Sequence, depth: int | None = None) -> None:
        """Withdraw the announcement of this sequence's first `depth` blocks, or of all blocks by default."""
        announced = sequence.announced  # the last entry is the next block
        while announced and (depth is None or announced[-1][0] < depth):
            del self._computing[announced.pop()[1]]

    def leads(self, sequence: Sequence) -> bool:
        """Return True if the sequence's next block will be new: no indexed block begins with its tokens."""
        size, node = self._blocks.block_size, sequence.node
        if not sequence.indexing or (node.alive and not node.keys):
            return True
        at = sequence.depth * size
        known = sequence.tokens[at : at + size].tobytes()
        after = bisect_left(node.keys, known)
        return node.alive and not (after < len(node.keys) and node.keys[after].startswith(known))

    def publish(self, sequence: Sequence) -> None:  # D68: equal prefixes merge at commit
        """Index the sequence's full committed blocks whose tokens are known.

        A block whose tokens are already indexed is replaced by the indexed one, so equal prefixes computed
        concurrently are stored only once. A digest collision, or a fork that would lose its prefix, ends the
        indexing of this sequence.
        """
        full = self._indexable(sequence)
        if full <= sequence.depth:
            return
        self._climb(sequence)
        size, index, groups = self._blocks.block_size, self._blocks.index, range(len(self._blocks.pools))
        while sequence.depth < full:
            i = sequence.depth
            tokens = sequence.tokens[i * size : (i + 1) * size].tobytes()
            known = sequence.digests
            digest = known[i] if i < len(known) else index.chain(sequence.node.digest, tokens)
            node = index.insert(sequence.node, digest, tokens)
            if node is None or self._splits_forks(sequence, i, node):
                break
            is_computed = i * size >= sequence.adopted
            for group in groups:
                if sequence.holds(group, i):
                    self._settle(sequence, group, i, node, replaces=is_computed and node.coldest > 0)
            if is_computed:
                node.coldest = 0
            sequence.node = node
            sequence.depth += 1
            if i == sequence.tail:
                self.mark_end(sequence)
        index.prune(sequence.node)
        sequence.indexing = sequence.depth == full
        self.withdraw(sequence, sequence.depth if sequence.indexing else None)

    def mark_end(self, sequence: Sequence) -> None:
        """Mark the indexed blocks in the windows at a sequence's current end, for `Blocks.outlasts`."""
        blocks, length = self._blocks, sequence.depth * self._blocks.block_size
        windows = [group for group, window in enumerate(blocks.windows) if window is not None]
        first = min((blocks.first_seen(group, length) for group in windows), default=sequence.depth)
        node = sequence.node
        while node.depth > first and node.parent is not None:
            node.is_end, node = True, node.parent

    def unpublish(self, sequence: Sequence) -> None:
        """Remove from the index, deepest first, the blocks that only this sequence computed and uses.

        After a truncation within an indexed block, this block is indexed beyond the sequence's depth.
        """
        self._climb(sequence)
        pools = self._blocks.pools
        for i in reversed(range(sequence.depth, max(map(len, sequence.tables)))):
            for group, (pool, table) in enumerate(zip(pools, sequence.tables, strict=True)):
                if sequence.holds(group, i) and pool.entry(table[i]) is not None:
                    if pool.references(table[i]) > 1:
                        return
                    pool.forget(table[i])
        while (parent := sequence.node.parent) is not None and sequence.depth > sequence.found:
            i, held = sequence.depth - 1, list(enumerate(sequence.node.blocks))
            if any(
                block is not None and pools[group].references(block) > sequence.holds(group, i)
                for group, block in held
            ):
                break
            sequence.node, sequence.depth = parent, i
            for group, block in held:
                if block is not None:
                    pools[group].forget(block)

    def _indexable(self, sequence: Sequence) -> int:  # D72: indexed when sealed, `recent` tokens late
        """Return the number of blocks that may be indexed: full, committed, old enough, with known tokens."""
        known = min(sequence.committed, len(sequence.tokens))
        old = max(sequence.adopted, sequence.committed - self._blocks.lag)
        return min(known, old) // self._blocks.block_size

    def _climb(self, sequence: Sequence) -> None:
        """Step back from nodes that left the index while the sequence didn't hold their blocks."""
        while not sequence.node.alive:  # a root is always alive
            sequence.step_back()

    def _splits_forks(self, sequence: Sequence, i: int, node: Node) -> bool:
        """Return True if a sequence would replace a block that a fork continues to use.

        With a lag, forks share full blocks that are not indexed. If later blocks were
        indexed after the replacement, the fork would hold them without a reference to their indexed prefix,
        and the prefix could be evicted before them.
        """
        return any(
            known is not None and known != table[i] and pool.references(table[i]) > 1
            for group, (pool, table, known) in enumerate(
                zip(self._blocks.pools, sequence.tables, node.blocks, strict=True)
            )
            if sequence.holds(group, i) and group != sequence.state_group
        )

    def _settle(self, sequence: Sequence, group: int, i: int, node: Node, *, replaces: bool) -> None:
        """Index a sequence's block, or make the sequence use the block that is already indexed.

        `replaces`: the indexed block gets the content of the sequence's block, which lost nothing.
        """
        blocks, table = self._blocks, sequence.tables[group]
        states = blocks.states
        if states is not None and group == states.group and not states.keeps(sequence, i):
            return  # this state advances with its sequence
        pool, mine, known = blocks.pools[group], table[i], node.blocks[group]
        if known is None:
            pool.keep(mine, node)
            blocks.index.attach(node, group, mine)
            if len(blocks.ladder):
                blocks.ladder.forget(node.key(group))
            if blocks.tiers is not None and blocks.tiers.disk is not None:
                blocks.unsaved[group, mine] = node
            if blocks.events.active:
                assert node.parent is not None, "a root has no blocks"
                stored = Stored(group=group, block=mine, digest=node.digest, parent=node.parent.digest)
                blocks.events.add(stored)
        elif known != mine:
            if replaces:
                blocks.orders.append(Copy(group=group, source=mine, target=known))
            pool.share(known)
            pool.release(mine)
            table[i] = known
            sequence.mark(group, i)


def most_cold(blocks: Blocks, prompt: PrefixQuery) -> int:
    """Return how many blocks of a hit may have been stored in fewer bits."""
    return int(blocks.cold_share * (most_reused(prompt) // blocks.block_size))


def most_reused(prompt: PrefixQuery) -> int:
    """Return the maximum number of tokens in a hit; at least one token must be left to compute."""
    most = max(0, len(prompt.tokens) - 1)
    return most if prompt.max_reuse is None else min(most, prompt.max_reuse)
