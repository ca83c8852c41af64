"""Sequences: tokens, block tables of all layer groups, memory use, and the set of live sequences."""

from array import array
from dataclasses import dataclass, field

from kvq.blockmgr.pool import BlockId
from kvq.blockmgr.prefix import Node
from kvq.errors import ConfigError

HOLE = BlockId(-1)  # a table entry without a state block

Work = list[tuple["Sequence", int]]  # (sequence, new tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateMove:
    """Reads and writes of a sequence's recurrent state during its last append."""

    start: int  # tokens before the append
    source: BlockId  # block with the state after these tokens; a HOLE if there are none
    pieces: list[tuple[int, BlockId]]  # (tokens, block for the state after them), in order


@dataclass(kw_only=True, slots=True)
class BlockUse:
    """Memory use of one sequence. Values are block counts over all layer groups unless stated otherwise."""

    own: int = 0  # allocated from the pools
    shared: int = 0  # found in the prefix index, or inherited by a fork
    reused: int = 0  # tokens that did not have to be computed
    copied: int = 0  # blocks copied before a write or to reuse their first tokens
    recomputed: int = 0  # tokens computed again because a preemption lost their KV
    restored: int = 0  # tokens brought back from the tiers after a preemption
    peak: int = 0  # maximum number of blocks that one sequence held
    peak_bytes: int = 0  # maximum bytes that one sequence held, with each group's own block size

    def add(self, other: "BlockUse") -> None:
        """Add the use of another sequence. Each peak is the larger of the two."""
        peaks = max(self.peak, other.peak), max(self.peak_bytes, other.peak_bytes)
        for name in BlockUse.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.peak, self.peak_bytes = peaks

    def copy(self) -> "BlockUse":
        """Return a copy. Faster than `dataclasses.replace`; runs for every finished request."""
        found = BlockUse()
        for name in BlockUse.__slots__:
            setattr(found, name, getattr(self, name))
        return found


@dataclass(slots=True, eq=False)
class Sequence:
    """Length and block tables of one sequence. Any code may read it; only its `BlockManager` changes it.

    `tables[g][i]` is the block of positions [i * block_size, (i + 1) * block_size) in layer group g.
    Entries before `starts[g]` were released because no token can see them anymore; their values are
    meaningless. A group that keeps only the first tokens has no entries beyond its limit. A group of
    recurrent states has holes where no state is kept.
    """

    tables: list[list[BlockId]]  # by layer group
    starts: list[int]  # by layer group, index of the first held block
    node: Node  # of the last indexed block; a root if no block is indexed
    tenant: str = ""
    request: str = ""  # id of the request that it belongs to, if any
    length: int = 0  # tokens that have a slot
    committed: int = 0  # tokens whose KV is known to be valid
    adopted: int = 0  # leading tokens that were filled in: their blocks are old enough to index
    tokens: "array[int]" = field(default_factory=lambda: array("I"))  # ids known so far, tagged
    tag: int = 0  # of the adapter under which its next tokens are computed
    digests: list[bytes] = field(default_factory=list)  # of the prompt's full blocks
    depth: int = 0  # full blocks that are indexed
    found: int = 0  # leading indexed blocks that already existed when it started
    indexing: bool = True  # False if its tokens can't or must not be indexed
    announced: list[tuple[int, bytes]] = field(default_factory=list)  # blocks others may wait for, last first
    receipt: BlockUse = field(default_factory=BlockUse)
    state_group: int = -1  # layer group whose blocks hold recurrent states
    tail: int | None = None  # index of the prompt's last block whose state is kept; None: no state is kept
    move: StateMove | None = None  # of the last append
    is_changed: bool = False  # True if tables have entries that `take_changes` has not returned yet
    changed: list[int] = field(init=False)  # by layer group, index of the first such entry

    def __post_init__(self) -> None:
        self.changed = [len(table) for table in self.tables]

    def note_peak(self, block_bytes: list[int]) -> None:  # D66
        """Update the peaks from the blocks held now. `block_bytes`: bytes per block, by layer group."""
        blocks = nbytes = 0
        for group, size in enumerate(block_bytes):
            held = self.num_held_in(group)
            blocks += held
            nbytes += held * size
        self.receipt.peak = max(self.receipt.peak, blocks)
        self.receipt.peak_bytes = max(self.receipt.peak_bytes, nbytes)

    def mark(self, group: int, index: int) -> None:
        """Mark a table's entries from `index` on as changed."""
        self.is_changed = True
        self.changed[group] = min(self.changed[group], index)

    def mark_all(self) -> None:
        """Mark all entries of all tables as changed."""
        self.is_changed = True
        self.changed = [0] * len(self.tables)

    def fill(self, starts: list[int], held: list[list[BlockId]]) -> None:
        """Put these blocks into the tables. Each group's first block goes to its index in `starts`."""
        self.starts, self.tables = starts, tables_of(starts, held)
        self.mark_all()

    def adopt(
        self, length: int, starts: list[int], taken: list[list[BlockId]], block_bytes: list[int]
    ) -> None:
        """Put newly allocated blocks for the first `length` tokens into a new, empty sequence."""
        self.fill(starts, taken)
        self.length = self.adopted = length
        self.receipt.own = self.num_held
        self.note_peak(block_bytes)

    def step_back(self) -> None:
        """Move the end of the indexed prefix back by one block."""
        assert self.node.parent is not None, "a root has depth 0"
        self.node = self.node.parent
        self.depth -= 1

    def take_changes(self) -> list[tuple[int, int, list[BlockId]]]:  # D57: every changed entry exactly once
        """Return the table changes since the last call as (group, first index, entries from this index on).

        The changes are used to update copies of the tables on a device.
        """
        changes = []
        for group, (table, first) in enumerate(zip(self.tables, self.changed, strict=True)):
            if first < len(table) and group != self.state_group:
                changes.append((group, first, table[first:]))
            self.changed[group] = len(table)
        self.is_changed = False
        return changes

    def holds(self, group: int, index: int) -> bool:
        """Return True if a table holds a block at `index`: not released, and within the group's limit."""
        table = self.tables[group]
        return self.starts[group] <= index < len(table) and table[index] != HOLE

    def held_in(self, group: int) -> list[BlockId]:
        """Return the blocks currently held in a layer group."""
        held = self.tables[group][self.starts[group] :]
        return [block for block in held if block != HOLE] if group == self.state_group else held

    def num_held_in(self, group: int) -> int:
        """Return the number of blocks currently held in a layer group."""
        if group == self.state_group:
            return len(self.held_in(group))
        return len(self.tables[group]) - self.starts[group]

    @property
    def held(self) -> list[list[BlockId]]:
        """Currently held blocks, by layer group."""
        return [self.held_in(group) for group in range(len(self.tables))]

    @property
    def num_held(self) -> int:
        """Number of currently held blocks, over all layer groups."""
        return sum(self.num_held_in(group) for group in range(len(self.tables)))


def tables_of(starts: list[int], held: list[list[BlockId]]) -> list[list[BlockId]]:
    """Return tables with these blocks. Each group's first block is at its index in `starts`."""
    return [[BlockId(0)] * start + blocks for start, blocks in zip(starts, held, strict=True)]


class LiveSequences(dict[Sequence, None]):
    """Live sequences, in the order in which they were started, with checks that refuse invalid use."""

    def check_live(self, sequence: Sequence) -> None:
        """Raise ConfigError unless the sequence is live in this manager."""
        if sequence not in self:
            raise ConfigError("the sequence was freed, or is another manager's; start a new one")

    def check_work(self, work: Work) -> None:
        """Raise ConfigError unless an append's sequences are live and distinct, and no count is negative."""
        if len(dict(work)) != len(work):
            raise ConfigError("a sequence comes twice in one append; add its counts up")
        for sequence, count in work:
            if sequence not in self:
                self.check_live(sequence)
            if count < 0:
                raise ConfigError(f"can't append {count} tokens; truncate drops some")

    def check_committed(self, sequence: Sequence, verb: str) -> None:
        """Raise ConfigError unless the sequence is live and all its tokens are committed."""
        self.check_live(sequence)
        if sequence.committed != sequence.length:
            raise ConfigError(
                f"can't {verb} a sequence with {sequence.length - sequence.committed} tokens that were "
                f"appended and not committed; commit or truncate them first"
            )
