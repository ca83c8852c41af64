"""Starting sequences from prefixes that are there, and knowing who is computing which."""

from bisect import bisect_left
from dataclasses import dataclass

from kvq.blockmgr.blocks import Blocks, Demand
from kvq.blockmgr.events import Found
from kvq.blockmgr.matching import Hit, find, needed_blocks
from kvq.blockmgr.orders import Copy
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

    def can_start(
        self, prompt: PrefixQuery, count: int, accounts: list[Account] | None, *, spare: list[int]
    ) -> bool:
        """True if blocks are there for a prompt's hit and `count` tokens more, with `spare` left over.

        `spare`: blocks per layer group. Changes nothing.
        """
        hit = self.hit(prompt)
        need = -(-(hit.length + count) // self._blocks.block_size) - len(hit.nodes)
        _, held = needed_blocks(self._blocks, hit.nodes, len(hit.nodes) * self._blocks.block_size)
        demand: Demand = [[(need, accounts[group] if accounts else None)] for group in range(len(held))]
        return self._blocks.can_take(demand, beside=held, spare=spare)

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
        sequence.receipt.peak = sequence.num_held

    def adopt(self, sequence: Sequence, length: int) -> None:
        """Give a new, empty sequence fresh blocks for its first tokens; see `BlockManager.adopt`."""
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
        sequence.fill(starts, taken)
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

    def _copy_part(self, sequence: Sequence, part: Node, length: int) -> None:
        """Copy a block whose first tokens come next, if there is room; its owner keeps it."""
        blocks = self._blocks
        sources = [[block] for block in part.blocks if block is not None]
        assert len(sources) == len(blocks.pools), "a part is there in every layer group"
        blocks.share(sources)  # so that making room can't evict it
        try:
            taken = blocks.take([[(1, sequence.account(group))] for group in range(len(sources))])
        except OutOfBlocks:
            return
        finally:
            blocks.release(sources)
        for group, ((source,), (target,)) in enumerate(zip(sources, taken, strict=True)):
            blocks.order(Copy(group=group, source=source, target=target))
            sequence.mark(group, len(sequence.tables[group]))
            sequence.tables[group].append(target)
        sequence.length = length
        sequence.receipt.own += len(sources)
        sequence.receipt.copied += len(sources)


def _most_reused(prompt: PrefixQuery) -> int:
    """Tokens that a hit may hold: at least one is left to compute."""
    most = max(0, len(prompt.tokens) - 1)
    return most if prompt.max_reuse is None else min(most, prompt.max_reuse)
