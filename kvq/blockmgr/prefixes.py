"""Prefixes that are there, and who is computing which: how much of a prompt the pools hold, by the rule that
makes a hit valid in every layer group, and starting sequences from it.
"""

from bisect import bisect_left
from dataclasses import dataclass

from kvq.blockmgr.blocks import Blocks
from kvq.blockmgr.events import Copy, Found
from kvq.blockmgr.pool import BlockId
from kvq.blockmgr.prefix import TOKEN_BYTES, Node, PrefixQuery
from kvq.blockmgr.sequence import Sequence
from kvq.errors import ConfigError, OutOfBlocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """Whole blocks that are there, and a block that starts with the tokens after them."""

    nodes: list[Node]  # of the whole blocks, from the root on
    part: Node | None  # a block whose first tokens come next in the prompt; to be copied
    length: int  # tokens, those of the part included


def find(blocks: Blocks, prompt: PrefixQuery, max_tokens: int) -> Hit:
    """The longest valid hit of at most `max_tokens` tokens. Changes nothing.

    A hit of length L is valid if full-attention groups hold all of [0, L), those with a limit what of it
    lies below that, and sliding-window groups the part of it that a token at position L sees: of recurrent
    states the one after L tokens.
    """
    check_prompt(blocks, prompt)
    size = blocks.block_size
    walked = blocks.index.walk(prompt, max_tokens // size)
    depth = _valid_depth(blocks, walked)
    nodes = walked[:depth]
    parent = nodes[-1] if nodes else blocks.index.root(prompt.root)
    start = depth * size
    if blocks.states is not None:  # a state is that of a whole block
        return Hit(nodes=nodes, part=None, length=start)
    rest = prompt.data[start * TOKEN_BYTES : min(start + size, max_tokens) * TOKEN_BYTES]
    part, common = blocks.index.best_child(parent, rest, blocks.num_groups_at(depth))
    return Hit(nodes=nodes, part=part, length=start + common)


def needed_blocks(blocks: Blocks, nodes: list[Node], length: int) -> tuple[list[int], list[list[BlockId]]]:
    """Of a valid hit's whole blocks those that a token at position `length` needs, per layer group.

    Returns (index of the first one, blocks from there on).
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
    """Raise ConfigError if a prompt was prepared for blocks of another size: its digests mean others."""
    if prompt.block_size != blocks.block_size:
        raise ConfigError(
            f"the prompt was prepared for blocks of {prompt.block_size} tokens, these have "
            f"{blocks.block_size}; prepare it with this manager's prompt()"
        )


def _valid_depth(blocks: Blocks, nodes: list[Node]) -> int:
    """The most leading nodes that form a valid hit."""
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
    run = [0] * len(blocks.windows)  # neighbouring blocks that are there, up to the node before
    for i, node in enumerate(nodes[:depth], start=1):
        length = i * blocks.block_size
        valid = True
        for group in sliding:
            run[group] = run[group] + 1 if node.blocks[group] is not None else 0
            valid = valid and run[group] >= i - blocks.first_seen(group, length)
        if valid:
            best = i
    return best


@dataclass(frozen=True, slots=True)
class Match:
    """What a prompt would find."""

    length: int  # tokens that need not be computed
    waits_for: Sequence | None  # who is computing the tokens after them right now; better wait


class Prefixes:
    """Prefix hits for new sequences, and the prefixes that running sequences will bring."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._computing: dict[bytes, Sequence] = {}  # digest of a prompt's block -> who computes it

    def hit(self, prompt: PrefixQuery) -> Hit:
        """The longest hit that leaves at least one token to compute. Changes nothing."""
        return find(self._blocks, prompt, _most_reused(prompt))

    def match(self, prompt: PrefixQuery) -> Match:
        """The hit's length, and who is computing the block after its whole ones. Changes nothing."""
        hit = self.hit(prompt)
        i, size = self.next_known(prompt, len(hit.nodes)), self._blocks.block_size
        end = (i + 1) * size
        if end > _most_reused(prompt):
            return Match(hit.length, None)
        owner = self._computing.get(self._blocks.index.digest_at(prompt, i))
        if owner is None or owner.depth > i or owner.node.root != prompt.root:
            return Match(hit.length, None)
        if self._blocks.states is not None and not self._blocks.states.keeps(owner, i):
            return Match(hit.length, None)
        same = owner.tokens[:end].tobytes() == prompt.data[: end * TOKEN_BYTES]
        return Match(hit.length, owner if same else None)

    def next_known(self, prompt: PrefixQuery, index: int) -> int:
        """Index of the block that makes a hit longer, from `index` on: of recurrent states not every one."""
        states = self._blocks.states
        if states is None:
            return index
        size = self._blocks.block_size
        periodic = -(-(index + 1) * size // states.every) * states.every // size - 1
        tail = _most_reused(prompt) // size - 1
        return tail if index <= tail < periodic else periodic

    def computing(self) -> dict[bytes, Sequence]:
        """Digests of blocks that are being computed, and by whom."""
        return dict(self._computing)

    def can_start(self, prompt: PrefixQuery, count: int, *, spare: list[int]) -> bool:
        """True if blocks are there for a prompt's hit and `count` tokens more, with `spare` left over.

        `spare`: blocks per layer group. Changes nothing.
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

    def publish(self, sequence: Sequence) -> None:
        """Index the full blocks whose tokens are known and whose KV is good."""
        if self._blocks.indexable(sequence) > sequence.depth:
            sequence.indexing = self._blocks.publish(sequence)
            self.withdraw(sequence, sequence.depth if sequence.indexing else None)

    def leads(self, sequence: Sequence) -> bool:
        """True if no indexed block begins as the next one to index of this sequence does: it will be new."""
        size, node = self._blocks.block_size, sequence.node
        if not sequence.indexing or (node.alive and not node.keys):
            return True
        at = sequence.depth * size
        known = sequence.tokens[at : at + size].tobytes()
        after = bisect_left(node.keys, known)
        return node.alive and not (after < len(node.keys) and node.keys[after].startswith(known))

    def fill(self, sequence: Sequence, prompt: PrefixQuery) -> None:
        """Share a prompt's hit with its new, empty sequence; queue the copy of a part of a block.

        The part is left out when no block is free for the copy. Never raises OutOfBlocks.
        """
        hit, events = self.hit(prompt), self._blocks.events
        sequence.length = len(hit.nodes) * self._blocks.block_size
        starts, held = needed_blocks(self._blocks, hit.nodes, sequence.length)
        self._blocks.share(held)
        if events.active:
            for group, blocks in enumerate(held):
                for block in blocks:
                    events.add(Found(group=group, block=block))
        sequence.fill(starts, held)
        if hit.nodes:
            sequence.node = hit.nodes[-1]
        sequence.depth = sequence.found = len(hit.nodes)
        sequence.receipt.shared = sequence.num_held
        if hit.part is not None:
            self._copy_part(sequence, hit.part, hit.length)
        sequence.committed = sequence.length
        sequence.receipt.reused = sequence.length
        sequence.note_peak(self._blocks.block_bytes)

    def adopt(self, sequence: Sequence, length: int) -> None:
        """Give a new, empty sequence fresh blocks for its first tokens; see `BlockManager.adopt`."""
        blocks = self._blocks
        if length % blocks.block_size or not 0 <= length <= len(sequence.tokens):
            raise ConfigError(
                f"length must be a multiple of the block size {blocks.block_size} and at most the "
                f"prompt's {len(sequence.tokens)} tokens, got {length}"
            )
        ends = [blocks.entries(group, length) for group in range(len(blocks.pools))]
        starts = [min(blocks.first_seen(group, length), end) for group, end in enumerate(ends)]
        taken = blocks.take([end - first for first, end in zip(starts, ends, strict=True)])
        sequence.fill(starts, taken)
        sequence.length = sequence.adopted = length
        sequence.receipt.own = sequence.num_held
        sequence.note_peak(blocks.block_bytes)

    def announce(self, sequence: Sequence, prompt: PrefixQuery) -> None:
        """Let others wait for the full blocks of a prompt that its sequence still has to compute."""
        known = max(0, len(prompt.tokens) - self._blocks.lag)
        for i in reversed(range(sequence.depth, known // self._blocks.block_size)):
            digest = self._blocks.index.digest_at(prompt, i)
            if digest not in self._computing:
                self._computing[digest] = sequence
                sequence.announced.append((i, digest))

    def withdraw(self, sequence: Sequence, depth: int | None = None) -> None:
        """Nobody need wait any more for this sequence's first `depth` blocks, by default for any."""
        announced = sequence.announced  # the next block to come is the last one
        while announced and (depth is None or announced[-1][0] < depth):
            del self._computing[announced.pop()[1]]

    def _copy_part(self, sequence: Sequence, part: Node, length: int) -> None:
        """Copy a block whose first tokens come next, if there is room; its owner keeps it."""
        blocks = self._blocks
        sources = [[] if block is None else [block] for block in part.blocks]
        copied = sum(map(len, sources))
        assert copied == blocks.num_groups_at(part.depth - 1), "a part is there in every layer group"
        blocks.share(sources)  # so that making room can't evict it
        try:
            taken = blocks.take(list(map(len, sources)))
        except OutOfBlocks:
            return
        finally:
            blocks.release(sources)
        for group, pairs in enumerate(map(zip, sources, taken)):
            for source, target in pairs:
                blocks.order(Copy(group=group, source=source, target=target))
                sequence.mark(group, len(sequence.tables[group]))
                sequence.tables[group].append(target)
        sequence.length = length
        sequence.receipt.own += copied
        sequence.receipt.copied += copied


def _most_reused(prompt: PrefixQuery) -> int:
    """Tokens that a hit may hold: at least one is left to compute."""
    most = max(0, len(prompt.tokens) - 1)
    return most if prompt.max_reuse is None else min(most, prompt.max_reuse)
