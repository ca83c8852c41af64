"""Starting sequences from prefixes that are there, and knowing who is computing which."""

from bisect import bisect_left
from dataclasses import dataclass

from kvq.blockmgr.blocks import Blocks
from kvq.blockmgr.events import Found
from kvq.blockmgr.ids import BlockId
from kvq.blockmgr.matching import Hit, find
from kvq.blockmgr.pool import Account
from kvq.blockmgr.prefix import TOKEN_BYTES, Node, PrefixQuery
from kvq.blockmgr.sequence import Sequence
from kvq.errors import ConfigError, OutOfBlocks


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
        i, size = len(hit.nodes), self._blocks.block_size
        end = (i + 1) * size
        if end > _most_reused(prompt):
            return Match(hit.length, None)
        owner = self._computing.get(self._blocks.index.digest_at(prompt, i))
        if owner is None or owner.depth > i or owner.node.root != prompt.root:
            return Match(hit.length, None)
        same = owner.tokens[:end].tobytes() == prompt.data[: end * TOKEN_BYTES]
        return Match(hit.length, owner if same else None)

    def computing(self) -> dict[bytes, Sequence]:
        """Digests of blocks that are being computed, and by whom."""
        return dict(self._computing)

    def tables(self, hit: Hit, length: int) -> tuple[list[int], list[list[BlockId]]]:
        """(starts, tables) of the whole blocks of a hit that a token at position `length` needs."""
        starts, tables = [], []
        for group in range(len(self._blocks.pools)):
            first = min(self._blocks.first_seen(group, length), len(hit.nodes))
            held = [block for node in hit.nodes[first:] if (block := node.blocks[group]) is not None]
            assert len(held) == len(hit.nodes) - first, "a valid hit holds every block"
            starts.append(first)
            tables.append([BlockId(0)] * first + held)
        return starts, tables

    def can_start(
        self, prompt: PrefixQuery, count: int, accounts: list[Account] | None, *, spare: list[int]
    ) -> bool:
        """True if blocks are there for a prompt's hit and `count` tokens more, with `spare` left over.

        `spare`: blocks per layer group. Changes nothing.
        """
        hit = self.hit(prompt)
        size = self._blocks.block_size
        starts, tables = self.tables(hit, len(hit.nodes) * size)
        need = -(-(hit.length + count) // size) - len(hit.nodes)
        return self._blocks.can_take(
            [[(need, accounts[group] if accounts else None)] for group in range(len(tables))],
            beside=[table[start:] for start, table in zip(starts, tables, strict=True)],
            spare=spare,
        )

    def can_start_without_reuse(
        self, count: int, accounts: list[Account] | None, *, spare: list[int]
    ) -> bool:
        """`can_start` for a sequence that shares nothing and appends its first `count` tokens."""
        need, groups = -(-count // self._blocks.block_size), range(len(self._blocks.pools))
        return self._blocks.can_take(
            [[(need, accounts[group] if accounts else None)] for group in groups],
            beside=[[] for _ in groups],
            spare=spare,
        )

    def publish(self, sequence: Sequence) -> None:
        """Index the full blocks whose tokens are known and whose KV is good."""
        if min(sequence.committed, len(sequence.tokens)) // self._blocks.block_size > sequence.depth:
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
        hit = self.hit(prompt)
        self._share(sequence, hit, len(hit.nodes) * self._blocks.block_size)
        if hit.part is not None:
            self._copy_part(sequence, hit.part, hit.length)
        sequence.committed = sequence.length
        sequence.receipt.reused = sequence.length
        sequence.receipt.peak = sequence.num_held

    def adopt(self, sequence: Sequence, length: int) -> None:
        """Give a new, empty sequence fresh blocks for its first `length` tokens, contents to come.

        Raises:
            ConfigError: `length` is no multiple of the block size, or beyond the sequence's tokens.
            OutOfBlocks: too few blocks; nothing changed.
        """
        total, rest = divmod(length, self._blocks.block_size)
        if rest or not 0 <= length <= len(sequence.tokens):
            raise ConfigError(
                f"length must be a multiple of the block size {self._blocks.block_size} and at most the "
                f"prompt's {len(sequence.tokens)} tokens, got {length}"
            )
        starts = [
            min(self._blocks.first_seen(group, length), total) for group in range(len(self._blocks.pools))
        ]
        taken = self._blocks.take(
            [[(total - first, sequence.account(group))] for group, first in enumerate(starts)]
        )
        for group, blocks in enumerate(taken):
            sequence.tables[group] = [BlockId(0)] * starts[group] + blocks
            sequence.starts[group] = starts[group]
            sequence.mark(group, 0)
        sequence.length = length
        sequence.receipt.own = sequence.receipt.peak = sequence.num_held

    def announce(self, sequence: Sequence, prompt: PrefixQuery) -> None:
        """Let others wait for the full blocks of a prompt that its sequence still has to compute."""
        for i in reversed(range(sequence.depth, len(prompt.tokens) // self._blocks.block_size)):
            digest = self._blocks.index.digest_at(prompt, i)
            if digest not in self._computing:
                self._computing[digest] = sequence
                sequence.announced.append((i, digest))

    def withdraw(self, sequence: Sequence, depth: int | None = None) -> None:
        """Nobody need wait any more for this sequence's first `depth` blocks, by default for any."""
        announced = sequence.announced  # the next block to come is the last one
        while announced and (depth is None or announced[-1][0] < depth):
            del self._computing[announced.pop()[1]]

    def _share(self, sequence: Sequence, hit: Hit, length: int) -> None:
        sequence.starts, sequence.tables = self.tables(hit, length)
        events = self._blocks.events
        for pool, table, start in zip(self._blocks.pools, sequence.tables, sequence.starts, strict=True):
            for block in table[start:]:
                pool.share(block)
        if events.active:
            for group, (table, start) in enumerate(zip(sequence.tables, sequence.starts, strict=True)):
                for block in table[start:]:
                    events.add(Found(group=group, block=block))
        for group in range(len(sequence.tables)):
            sequence.mark(group, 0)
        if hit.nodes:
            sequence.node = hit.nodes[-1]
        sequence.depth = sequence.found = len(hit.nodes)
        sequence.length = length
        sequence.receipt.shared = sequence.num_held

    def _copy_part(self, sequence: Sequence, part: Node, length: int) -> None:
        """Copy a block whose first tokens come next, if there is room; its owner keeps it."""
        blocks = self._blocks
        sources = [block for block in part.blocks if block is not None]
        assert len(sources) == len(blocks.pools), "a part is there in every layer group"
        for pool, source in zip(blocks.pools, sources, strict=True):
            pool.share(source)  # so that making room can't evict it
        try:
            taken = blocks.take([[(1, sequence.account(group))] for group in range(len(sources))])
        except OutOfBlocks:
            return
        finally:
            for pool, source in zip(blocks.pools, sources, strict=True):
                pool.release(source)
        for group, (source, (target,)) in enumerate(zip(sources, taken, strict=True)):
            blocks.order_copy(group, source, target)
            sequence.mark(group, len(sequence.tables[group]))
            sequence.tables[group].append(target)
        sequence.length = length
        sequence.receipt.own += len(sources)
        sequence.receipt.copied += len(sources)


def _most_reused(prompt: PrefixQuery) -> int:
    """Tokens that a hit may hold: at least one is left to compute."""
    most = max(0, len(prompt.tokens) - 1)
    return most if prompt.max_reuse is None else min(most, prompt.max_reuse)
